"""Which devices a group owns, and the environment that each of its ranks sees; no torch, no CUDA.

A rank sees exactly one device, or none on a CPU profile. It inherits the agent's environment except for
what only the agent may use: the farm's settings and the addresses and keys of database, broker and
store.
"""

import socket
from collections.abc import Mapping, Sequence

AGENT_ONLY_PREFIXES = ("FARM_", "AWS_")
AGENT_ONLY_NAMES = frozenset(
    {"DATABASE_URL", "DATABASE_URL_FILE", "REDIS_URL", "REDIS_URL_FILE", "S3_ENDPOINT_URL"}
)
DETERMINISTIC = "MAGI2_DETERMINISTIC"
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


class DeviceError(Exception):
    """The devices or the environment do not fit the profile; the message says what to change."""


def parse_devices(text: str) -> tuple[int, ...]:
    """Read a list such as `0,1,2,3`; an empty text means no device.

    Raises:
        DeviceError: An entry is no device number, or comes twice.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise DeviceError(f"devices must be numbers such as 0,1,2,3 (got {text!r})")
    devices = tuple(int(part) for part in parts)
    if len(set(devices)) != len(devices):
        raise DeviceError(f"devices must differ (got {text!r})")
    return devices


def check_devices(profile: str, wanted: int, devices: Sequence[int]) -> None:
    """Refuse a list that has not exactly as many devices as the profile needs.

    Raises:
        DeviceError: The numbers differ.
    """
    if len(devices) != wanted:
        given = ",".join(str(device) for device in devices) or "none"
        raise DeviceError(
            f"profile {profile} runs on {wanted} devices, and {len(devices)} were given ({given}): "
            "name them with --devices or FARM_WORKER__DEVICES, or choose another profile"
        )


def check_deterministic(base: Mapping[str, str], *, deterministic: bool) -> None:
    """Refuse an environment that says otherwise than the profiles file.

    Raises:
        DeviceError: `MAGI2_DETERMINISTIC` is set to the other value, or to no boolean.
    """
    text = base.get(DETERMINISTIC, "").lower()
    if text and text not in (_TRUE if deterministic else _FALSE):
        raise DeviceError(
            f"{DETERMINISTIC} is {text!r}, but the profiles file says {str(deterministic).lower()}; "
            "unset the variable or change the file, on every host of the farm"
        )


def free_port() -> int:
    """Return a loopback port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(
    base: Mapping[str, str], *, rank: int, devices: Sequence[int], world: int, port: int, deterministic: bool
) -> dict[str, str]:
    """Return the whole environment of one rank."""
    kept = {
        name: value
        for name, value in base.items()
        if name not in AGENT_ONLY_NAMES and not name.startswith(AGENT_ONLY_PREFIXES)
    }
    return kept | {
        # Numbered as the driver numbers them: NVML must look at the very device that the rank uses.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": str(devices[rank]) if devices else "",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world),
        "PYTHONUNBUFFERED": "1",
        DETERMINISTIC: "1" if deterministic else "0",
    }
