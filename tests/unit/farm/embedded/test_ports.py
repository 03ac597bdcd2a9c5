"""Free ports of embedded mode."""

from farm.embedded.ports import GRPC_OFFSET, free_ports, is_free


def test_ports_are_distinct_and_free_with_their_grpc_twins() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(is_free(port) and is_free(port + GRPC_OFFSET) for port in ports)


def test_grpc_twins_stay_below_the_range_of_outgoing_connections() -> None:
    assert all(port + GRPC_OFFSET < 32_768 for port in free_ports(20))
