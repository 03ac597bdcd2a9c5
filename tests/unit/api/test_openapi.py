"""The hand-written parts of the description name exactly what the readers know."""

import pytest
from starlette.datastructures import QueryParams

from api.listing import list_query_of
from api.members import read_members
from api.openapi import LIST_PARAMETERS, SUBMIT_BODY
from api.problems import RefusedError
from magi2.contract import REQUEST_FIELDS


def described_members() -> set[str]:
    content = SUBMIT_BODY["requestBody"]["content"]
    (first, second) = (set(entry["schema"]["properties"]) for entry in content.values())
    assert first == second
    return first


def test_every_described_member_is_read_and_every_field_of_the_contract_is_described() -> None:
    described = described_members()
    members, _ = read_members(dict.fromkeys(described, "x"), default_retention_s=60, max_retention_s=60)
    assert set(members.contract) - REQUEST_FIELDS == set()
    assert REQUEST_FIELDS - described == set()


def test_described_parameters_of_the_list_are_those_it_takes() -> None:
    for parameter in LIST_PARAMETERS["parameters"]:
        with pytest.raises(RefusedError) as refused:
            list_query_of(QueryParams({parameter["name"]: "\0"}))
        assert "is not supported" not in refused.value.message
