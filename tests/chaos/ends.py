"""How a test with a few jobs looks at what is left: rows, objects and their keys."""

from tests.chaos.invariants import check_objects, never_ended
from tests.row_invariants import NEVER
from tests.service.conftest import S3Place
from worker.sweeps import Sweeper, sweep_deleted, sweep_lost_attempts


def stored_keys(s3: S3Place) -> set[str]:
    """List what is stored below the prefix of a test."""
    listing = s3.client().list_objects_v2(Bucket=s3.bucket, Prefix=s3.prefix)
    return {entry["Key"].removeprefix(f"{s3.prefix}/") for entry in listing.get("Contents", [])}


def check_ended(bench, jobs, object_store, s3) -> None:
    """Check that these jobs have ended and that all invariants of rows and objects hold (I1 to I8)."""
    assert never_ended(bench.database, [job.id for job in jobs]) == []
    for query in NEVER.values():
        with bench.database.connect() as conn:
            assert conn.exec_driver_sql(query).all() == [], query
    sweeper = Sweeper(bench.database, object_store, bench.rules)
    sweep_lost_attempts(sweeper)
    sweep_deleted(sweeper)
    kept, wrong = check_objects(bench.database, object_store)
    assert wrong == []
    assert stored_keys(s3) == kept
