"""Breaks of what keeps accounts apart and streams bounded, and the tests that see them."""

from tests.mutants.mutant import Mutant

API = "tests/service/api"
STREAMS = "tests/unit/api/test_streams.py"
TENANTS = (
    Mutant(
        "tenants", "a storm of one account holds every connection", "api/turns.py",
        "AT_A_TIME = 2", "AT_A_TIME = 10_000",
        "tests/unit/api/test_turns.py",
    ),
    Mutant(
        "tenants", "keys of others are changed", "farm/keys.py",
        "select(*_COLUMNS).where(api_key.c.id8 == id8, api_key.c.account_id == account_id)\n    if is_open:",
        "select(*_COLUMNS).where(api_key.c.id8 == id8)\n    if is_open:",
        f"{API}/test_tenants.py::test_every_route_with_an_id_is_as_if_the_thing_did_not_exist",
    ),
    Mutant(
        "tenants", "a clip of another account is reused", "farm/jobs/submit.py",
        "        .where(job.c.account_id == account_id, job.c.reuse_key == reuse_key)\n",
        "        .where(job.c.reuse_key == reuse_key)\n",
        f"{API}/test_tenants.py::test_finished_video_of_another_account_is_not_reused",
    ),
    Mutant(
        "tenants", "an idempotency key is everybody's", "farm/idempotency.py",
        "        (idempotency_key.c.account_id == scope.account_id)\n        & (idempotency_key.c.route",
        "        (idempotency_key.c.route",
        f"{API}/test_tenants.py::test_idempotency_key_of_another_account_is_another_key",
    ),
    Mutant(
        "F-12", "each process counts a key's streams for itself", "api/streams.py",
        "        if not has_place:\n", "        if False:\n",
        f"{STREAMS}::test_stream_without_a_place_in_all_processes_is_refused_and_not_counted",
    ),
    Mutant(
        "5", "streams outlive their key", "api/streams.py",
        "if stream.key_id in ids and stream.key_id not in still_open:", "if False:",
        f"{API}/test_events.py::test_stream_of_a_revoked_key_ends_in_every_process",
    ),
    Mutant(
        "F-10", "a refusal hides what was given", "magi2/contract.py",
        "        self.refuse(field, code, f\"{rule} (got {shown(self.given[field])})\")",
        "        self.refuse(field, code, rule)",
        "tests/unit/magi2/test_contract.py",
    ),
    Mutant(
        "F-10", "a library speaks to clients", "api/plain_words.py",
        "    return Problem(name, \"invalid_field\", f\"{name} {rule} (got {given(entry.get('input'))})\")",
        "    return Problem(name, \"invalid_field\", f\"{name}: {entry['msg']}\")",
        "tests/unit/api/test_plain_words.py",
    ),
    Mutant(
        "4.1", "an acceleration that the profile forbids", "magi2/contract.py",
        "    if value not in reader.limits.accelerations:\n", "    if False:\n",
        "tests/unit/magi2/test_contract.py",
    ),
)  # fmt: skip
