"""The dataclasses and the tables name the same columns."""

from dataclasses import fields

import pytest

from farm.db import tables
from farm.jobs.job import Asset, Attempt, Event, Job
from tests.job_rows import running_job


@pytest.mark.parametrize(
    ("row", "table"),
    [(Job, tables.job), (Asset, tables.asset), (Attempt, tables.job_attempt), (Event, tables.job_event)],
)
def test_fields_are_the_columns_of_the_table(row, table):
    assert [field.name for field in fields(row)] == [column.name for column in table.columns]


def test_losses_and_preemptions_are_not_charged_to_the_user():
    assert running_job(attempts=7, infra_losses=3, preemptions=2).attempts_used == 2
