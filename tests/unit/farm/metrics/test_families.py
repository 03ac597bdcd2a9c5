"""What a process counts is part of the table, with its labels."""

from farm.metrics.families import REGISTRY
from tests.metric_table import TABLE


def test_every_family_is_in_the_table_with_its_type_and_labels():
    for collector in set(REGISTRY._collector_to_names):
        name = f"{collector._name}_total" if collector._type == "counter" else collector._name
        assert TABLE[name] == (collector._type, tuple(collector._labelnames)), name
