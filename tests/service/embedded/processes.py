"""What tests read about processes from the kernel: who listens where, who lives, who descends from whom."""

from pathlib import Path

LISTEN = "0A"
LOOPBACK_ADDRESSES = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def descendants(pid: int) -> set[int]:
    """Return the living processes below a process."""
    parents = {}
    for each in all_pids():
        try:
            parents[each] = parent_of(each)
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, border = set(), {pid}
    while border:
        border = {child for child, parent in parents.items() if parent in border} - found
        found |= border
    return {each for each in found if is_alive(each)}


def listening_addresses(pids: set[int], ports: set[int]) -> set[tuple[str, int]]:
    """Return (address in hex, port) of every TCP socket that these processes or ports listen on.

    The ports are for processes of another user, whose sockets even root may not see in a container.
    """
    inodes = set()
    for pid in pids:
        try:
            links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == LISTEN and (fields[9] in inodes or int(port, 16) in ports):
                found.add((address, int(port, 16)))
    return found
