"""Plant one break per rule into a copy of the source and see that the test of that rule fails.

`make test-mutants` runs it; it is no part of the tiers. Each mutant replaces one piece of text, which must
occur exactly once, and names the one test that must catch it. First all those tests must pass on the copy as
it is. Exit 1 if a mutant lives, if its text is not there, or if a test fails without it. `-k WORD` picks
mutants.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.dashboard import DASHBOARD
from tests.mutants.mutant import Mutant
from tests.mutants.queue import QUEUE
from tests.mutants.tenants import TENANTS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("api", "farm", "worker", "magi2", "kernels", "migrations", "tests", "clients", "docs")
FILES = ("pyproject.toml", "profiles.yaml", "magi2-farm")
API = "tests/service/api"
JOBS = "tests/service/farm/jobs"


MUTANTS = (
    Mutant(
        "F-40", "a job without a doorbell", "farm/jobs/transition.py",
        ".add_cte(first, ring)", ".add_cte(first)",
        f"{JOBS}/test_submit.py",
    ),
    Mutant(
        "F-40", "publish before commit", "farm/jobs/transition.py",
        "    queued = Job.from_row(written)\n    if written",
        "    conn.commit()\n    queued = Job.from_row(written)\n    if written",
        f"{API}/test_idempotency.py::test_refused_request_leaves_its_key_free"
        f" {API}/test_batches.py::test_atomic_batch_that_does_not_fit_the_queue_queues_nothing",
    ),
    Mutant(
        "F-11", "store an answer that is not 2xx", "api/idempotency.py",
        "    answer = act(conn)\n    text",
        "    try:\n        answer = act(conn)\n    except Exception as exc:\n"
        "        answer = Answer(str(exc))\n    text",
        f"{API}/test_idempotency.py::test_refused_request_leaves_its_key_free",
    ),
    Mutant(
        "F-11", "a key counts for any request", "farm/idempotency.py",
        "    if bytes(row.fingerprint) != scope.fingerprint:\n        raise KeyReusedError\n", "",
        f"{API}/test_idempotency.py::test_key_of_another_request_is_refused",
    ),
    Mutant(
        "F-11", "files are not part of the request", "farm/idempotency.py",
        "_canonical(members), sorted(digests)]", "_canonical(members)]",
        f"{API}/test_idempotency.py::test_key_of_another_request_is_refused",
    ),
    Mutant(
        "F-11", "answers are kept in the clear", "api/idempotency.py",
        "seal(services.secret_key, text), answer.job_id", "text.encode(), answer.job_id",
        f"{API}/test_idempotency.py::test_secret_of_a_webhook_is_repeated_but_not_kept_in_the_clear",
    ),
    Mutant(
        "F-11", "a replay costs a submit", "api/submission.py",
        "    stored = await find_answer(services, scope)\n    if stored is not None:",
        "    await count_submits(request, services, principal)\n"
        "    stored = await find_answer(services, scope)\n    if stored is not None:",
        f"{API}/test_limits.py::test_submits_are_counted_by_account_and_replays_are_not",
    ),
    Mutant(
        "tenants", "reads skip the account check", "farm/jobs/queries.py",
        "select(job).where(job.c.account_id == account_id, job.c.deleted_at.is_(None))",
        "select(job).where(job.c.deleted_at.is_(None))",
        f"{API}/test_content.py::test_timeline_tells_everything_but_what_is_for_operators",
    ),
    Mutant(
        "tenants", "acts skip the account check", "farm/jobs/control.py",
        "if locked is None or locked.job.account_id != account_id or", "if locked is None or",
        f"{API}/test_act.py::test_two_accounts_cannot_act_on_each_others_videos",
    ),
    Mutant(
        "tenants", "batches skip the account check", "farm/batches.py",
        "(batch.c.id == batch_id) & (batch.c.account_id == account_id)", "batch.c.id == batch_id",
        f"{API}/test_batches.py::test_batches_of_two_accounts_are_apart",
    ),
    Mutant(
        "tenants", "assets skip the account check", "farm/assets.py",
        "        & (asset.c.account_id == account_id)\n", "",
        f"{API}/test_assets.py::test_assets_of_two_accounts_are_apart",
    ),
    Mutant(
        "tenants", "an account's stream tells of others", "api/streams.py",
        "if stream.job_id is None and stream.account_id == account_id:", "if stream.job_id is None:",
        f"{API}/test_events.py::test_account_stream_tells_states_of_all_its_videos_and_of_no_other",
    ),
    Mutant(
        "F-12", "one waiting job too many", "farm/accounts.py",
        "            account_usage.c.queued"
        " < _limit(\"max_queued\", bindparam(\"max_queued\", type_=Integer())),\n",
        "",
        f"{API}/test_limits.py::test_max_queued_is_exact_under_many_submits_at_once",
    ),
    Mutant(
        "F-12", "GPU-seconds are not reserved", "farm/accounts.py",
        "            has_gpu_s,\n", "",
        f"{API}/test_limits.py::test_gpu_seconds_are_reserved_exactly_and_settled_at_the_end",
    ),
    Mutant(
        "F-12", "GPU-seconds are not given back", "farm/jobs/transition.py",
        "func.greatest(usage.gpu_s_reserved - before.gpu_s_reserved, 0)", "usage.gpu_s_reserved",
        f"{API}/test_limits.py::test_retry_needs_gpu_seconds_like_a_submit",
    ),
    Mutant(
        "F-12", "losing Redis is an error", "farm/limits.py",
        "except (RedisError, OSError) as exc:\n            log.warning(\"rate_limits_are_local\"",
        "except ZeroDivisionError as exc:\n            log.warning(\"rate_limits_are_local\"",
        f"{API}/test_limits.py::test_one_request_too_many_is_told_when_to_come_again",
    ),
    Mutant(
        "F-12", "buckets are not shared", "farm/limits.py",
        "        left = await self._take_shared(key, per_minute, rate, cost)\n", "        left = None\n",
        f"{API}/test_limits.py::test_two_processes_share_one_bucket",
    ),
    Mutant(
        "5", "a new key may do more", "farm/keys.py",
        "    if lacking:\n        raise ScopeError(lacking[0])\n", "",
        f"{API}/test_keys.py::test_nobody_makes_or_takes_a_key_that_may_do_more",
    ),
    Mutant(
        "5", "a revoked key lives for a minute", "api/auth.py",
        "CACHE_TTL_S = 5.0", "CACHE_TTL_S = 60.0",
        f"{API}/test_keys.py::test_other_processes_notice_a_revocation_within_five_seconds",
    ),
    Mutant(
        "F-05", "what has ended can be canceled", "farm/jobs/control.py",
        "        raise AlreadyFinishedError(job_id, locked.job.state)\n    return _stop",
        "        pass\n    return _stop",
        f"{API}/test_act.py::test_finished_video_cannot_be_canceled",
    ),
    Mutant(
        "F-06", "a deleted job is still shown", "farm/jobs/control.py",
        "{\"by\": by}, deleted_at=locked.at)", "{\"by\": by})",
        f"{API}/test_act.py::test_deleted_video_is_gone_for_every_call",
    ),
    Mutant(
        "F-10", "a crash tells what happened", "api/problems.py",
        "\"something went wrong on the server; the request id leads to the log\"", "str(exc)",
        f"{API}/test_surface.py::test_crash_answers_500_without_any_detail",
    ),
    Mutant(
        "F-13", "any name in extra_params", "api/members.py",
        "        if name not in EXTRA_PARAMS:", "        if name == \"\":",
        "tests/unit/api/test_members.py",
    ),
    Mutant(
        "F-14", "the later of two spellings wins", "api/multipart.py",
        "    if last in here:\n        return False\n", "",
        "tests/unit/api/test_multipart.py",
    ),
    Mutant(
        "F-15", "a request with problems is queued", "api/intake.py",
        "    problems = [*spelling, *checked.problems, *reference.problems, *farm_problems]",
        "    problems = [*spelling, *checked.problems, *reference.problems]",
        f"{API}/test_submit.py",
    ),
    Mutant(
        "F-16", "a failed video is an HTTP error", "api/routes/videos.py",
        "    is_unchanged = etag_of(view.job) in known\n    if wait",
        "    if view.job.error:\n        return Response(status_code=502)\n"
        "    is_unchanged = etag_of(view.job) in known\n    if wait",
        f"{API}/test_clients.py::test_openai_sdk_returns_a_failed_video_from_poll",
    ),
    Mutant(
        "F-17", "pages repeat their border", "farm/jobs/queries.py",
        "else position < bound)", "else position <= bound)",
        f"{JOBS}/test_queries.py",
    ),
    Mutant(
        "F-20", "any epoch's objects are public", "farm/jobs/lifecycle.py",
        "\"epoch\": epoch,", "\"epoch\": 0,",
        f"{JOBS}/test_lifecycle.py",
    ),
    Mutant(
        "F-21", "links last as long as they like", "farm/storage.py",
        "ExpiresIn=ttl_s", "ExpiresIn=86_400",
        f"{API}/test_content.py::test_url_is_a_link_that_ends_when_it_says",
    ),
    Mutant(
        "F-22", "pictures of any size are decoded", "farm/images.py",
        "MAX_SIDE = 16_384", "MAX_SIDE = 10**9",
        "tests/unit/farm/test_images.py",
    ),
    Mutant(
        "F-23", "a broken clip is a success", "farm/media.py",
        "    return Inspection(facts, breaches(facts, width, height))", "    return Inspection(facts, [])",
        "tests/unit/farm/test_media.py",
    ),
    Mutant(
        "F-25", "events of a full queue are lost", "api/streams.py",
        "                self._note_full(now_s)\n                return\n",
        "                self.cursor = event.seq\n                continue\n",
        "tests/unit/api/test_streams.py::test_full_queue_loses_nothing",
    ),
    Mutant(
        "F-25", "what was missed is not replayed", "api/routes/events.py",
        "        return min(int(given), view.job.seq)\n", "        return view.job.seq\n",
        f"{API}/test_events.py::test_last_event_id_replays_exactly_what_was_missed",
    ),
    Mutant(
        "F-26", "streams outlive a stop", "api/streams.py",
        "            if self._services.is_stopping():\n", "            if False:\n",
        f"{API}/test_events.py::test_stop_says_reconnect_and_ends_the_server",
    ),
    Mutant(
        "F-31", "the end of a batch is told again", "farm/batches.py",
        " or found.finished_at is not None:", ":",
        f"{API}/test_batches.py::test_end_of_the_last_member_is_told_once",
    ),
    Mutant(
        "4.1", "another engine's clip is reused", "farm/jobs/submit.py",
        "        .where(job.c.result[\"engine\"] == literal(dict(engine), JSONB))\n", "",
        f"{API}/test_assets.py::test_video_of_another_engine_or_without_content_is_not_reused",
    ),
    Mutant(
        "4.5", "clients that leave keep their jobs", "api/routes/sync.py",
        "    if on_disconnect == \"keep\" or", "    if on_disconnect or",
        f"{API}/test_sync.py::test_client_that_leaves_cancels_its_job_unless_it_wants_it_kept",
    ),
    Mutant(
        "6.4", "rows are marked before their objects go", "worker/sweeps.py",
        "        for key in (*outputs.values(), *images.values()):",
        "        with unit_of_work(sweeper.engine) as conn:\n            mark_deleted(conn, list(outputs))\n"
        "        for key in (*outputs.values(), *images.values()):",
        "tests/service/worker/test_retention.py::test_killed_sweep_marks_nothing_that_is_still_there_and_goes_on_later",
    ),
    Mutant(
        "6.4", "an image goes while a job needs it", "farm/retention.py",
        "        & ~is_used.exists()\n    )", "    )",
        "tests/service/worker/test_retention.py::test_image_stays_while_a_job_refers_to_it_and_goes_when_nobody_does",
    ),
)  # fmt: skip


def run_tests(copy: Path, tests: list[str]) -> int:
    """Run tests in the copy; return pytest's exit status."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    quiet = subprocess.DEVNULL
    return subprocess.run(command, cwd=copy, stdout=quiet, stderr=quiet, check=False).returncode


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def caught(copy: Path, mutant: Mutant) -> bool:
    """Plant one break, run its test, take the break out again."""
    path = copy / mutant.path
    source = path.read_text()
    if source.count(mutant.old) != 1:
        say(f"  its text occurs {source.count(mutant.old)} times in {mutant.path}")
        return False
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        return run_tests(copy, mutant.test.split()) == 1
    finally:
        path.write_text(source)


def main() -> int:
    """Run all mutants, or those that `-k` picks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only mutants whose rule, text or path holds this word")
    parser.add_argument("--area", choices=("api", "queue"), help="only mutants of this part")
    options = parser.parse_args()
    word = options.k
    of_api = (*MUTANTS, *DASHBOARD, *TENANTS)
    known = {"api": of_api, "queue": QUEUE, None: (*of_api, *QUEUE)}[options.area]
    mutants = [mutant for mutant in known if word in f"{mutant.rule} {mutant.what} {mutant.path}"]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        copy.chmod(0o755)
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in FILES:
            shutil.copy2(ROOT / name, copy / name)
        tests = sorted({test for mutant in mutants for test in mutant.test.split()})
        if run_tests(copy, tests) != 0:
            failing = [test for test in tests if run_tests(copy, [test]) != 0]
            say(f"without any mutant these fail: {' '.join(failing) or 'none of them alone'}")
            if failing:
                return 1
        lived = 0
        for mutant in mutants:
            is_caught = caught(copy, mutant)
            lived += not is_caught
            say(f"{'caught' if is_caught else 'LIVED '}  {mutant.rule:8} {mutant.what}")
    say(f"{len(mutants) - lived} of {len(mutants)} caught")
    return 1 if lived else 0


if __name__ == "__main__":
    sys.exit(main())
