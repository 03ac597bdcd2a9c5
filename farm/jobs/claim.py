"""Take a job for a group: fair between accounts, exact in its limits, never waiting while it holds a row."""

from collections.abc import Collection

from sqlalchemy import Connection

from farm.jobs.job import DEFAULT_RULES, Claimed, Rules


def claim(
    conn: Connection,
    group_id: str,
    profile: str,
    boot_id: str,
    contract_versions: Collection[int],
    *,
    rules: Rules = DEFAULT_RULES,
) -> Claimed | None:
    """Move the next job of a profile to `starting` under a new epoch and a lease; None when there is none."""
    ...
