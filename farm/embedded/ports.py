"""Pick free loopback ports below the range that the kernel uses for outgoing connections.

A port found free may be taken before the server binds it, so starters try again with fresh ones. SeaweedFS
adds 10,000 to every port for its gRPC twin, so its ports are free in pairs.
"""

import contextlib
import random
import socket

LOOPBACK = "127.0.0.1"
GRPC_OFFSET = 10_000
_FIRST, _LAST = 10_000, 21_999  # the twin then stays below 32,768, where Linux's ephemeral ports begin
_NUM_TRIES = 200

_draw = random.SystemRandom()  # the global generator is re-seeded by test runners: processes would collide


def is_free(port: int) -> bool:
    """Say whether a loopback port can be bound right now."""
    with contextlib.closing(socket.socket()) as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Return distinct loopback ports that are free together with their gRPC twins.

    Raises:
        OSError: No free ports were found.
    """
    found: list[int] = []
    for _ in range(_NUM_TRIES):
        port = _draw.randint(_FIRST, _LAST)
        if port not in found and is_free(port) and is_free(port + GRPC_OFFSET):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"no {count} free loopback ports between {_FIRST} and {_LAST}")
