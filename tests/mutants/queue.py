"""One break per rule of the queue: fencing, claims, leases, failures, relays, sweeps, ranks and waves."""

from tests.mutants.mutant import Mutant

FARM = "tests/service/farm"
JOBS = "tests/service/farm/jobs"
WORKER = "tests/service/worker"

QUEUE = (
    Mutant(
        "F-02", "attempts skip the epoch check", "farm/jobs/lifecycle.py",
        "locked is not None and locked.job.epoch == epoch and locked.job.is_active",
        "locked is not None and locked.job.is_active",
        f"{JOBS}/test_transition.py",
    ),
    Mutant(
        "F-02", "moves skip the epoch check", "farm/jobs/transition.py",
        "before.state not in allowed or (epoch is not None and before.epoch != epoch)",
        "before.state not in allowed",
        f"{JOBS}/test_transition.py",
    ),
    Mutant(
        "F-02", "a repeated move of a zombie is confirmed", "farm/jobs/lifecycle.py",
        "locked.job.epoch == epoch and locked.job.state is to", "locked.job.state is to",
        f"{JOBS}/test_transition.py",
    ),
    Mutant(
        "F-02", "a repeated move throws a render away", "farm/jobs/lifecycle.py",
        "return _has_made(locked, epoch, to) or move(", "return move(",
        f"{WORKER}/test_agent.py::test_answers_that_are_lost_after_the_commit_cost_no_render",
    ),
    Mutant(
        "F-02", "beats skip the epoch check", "farm/jobs/lifecycle.py",
        "job.c.id == job_id, job.c.epoch == epoch, job.c.group_id == group_id",
        "job.c.id == job_id, job.c.group_id == group_id",
        f"{JOBS}/test_transition.py",
    ),
    Mutant(
        "F-02", "any group may beat", "farm/jobs/lifecycle.py",
        "job.c.epoch == epoch, job.c.group_id == group_id,", "job.c.epoch == epoch,",
        f"{JOBS}/test_state_machine.py",
    ),
    Mutant(
        "F-02", "a stale worker uploads", "worker/outputs.py",
        "    attempt.fenced(\n        attempt.write(", "    bool(\n        attempt.write(",
        f"{WORKER}/test_agent.py::test_agent_whose_job_was_taken_over_uploads_nothing"
        " tests/chaos/test_cut_off.py",
    ),
    Mutant(
        "F-01", "an edge too many", "farm/jobs/states.py",
        "State.STARTING: frozenset({State.RUNNING, ",
        "State.STARTING: frozenset({State.RUNNING, State.UPLOADING, ",
        f"{JOBS}/test_state_machine.py",
    ),
    Mutant(
        "F-03", "an event without a new number", "farm/jobs/transition.py",
        "**columns, seq=job.c.seq + 1)", "**columns)",
        f"{JOBS}/test_control.py",
    ),
    Mutant(
        "F-04", "times are not kept with the attempt", "farm/jobs/transition.py",
        "changes = {**values, f\"{after.state}_at\": at}",
        "changes = {**values, \"worker_boot_id\": \"boot\"}",
        f"{JOBS}/test_transition.py",
    ),
    Mutant(
        "F-05", "success beats a cancel that came first", "farm/jobs/lifecycle.py",
        "    if held.job.cancel_requested_at is not None:\n"
        "        _cancel(conn, held)\n        return False\n",
        "",
        f"{JOBS}/test_state_machine.py",
    ),
    Mutant(
        "F-20", "all attempts write to one place", "farm/storage.py",
        "/{job_id}/e{epoch}/{name}", "/{job_id}/{name}",
        f"{JOBS}/test_garbage.py",
    ),
    Mutant(
        "F-20", "what lost attempts left stays", "farm/jobs/garbage.py",
        "job_attempt.c.uploading_at.is_not(None), job_attempt",
        "job_attempt.c.uploading_at.is_(None), job_attempt",
        f"{JOBS}/test_garbage.py",
    ),
    Mutant(
        "F-40", "a refused doorbell counts as sent", "farm/outbox.py",
        "            error = exc\n            break\n", "            error = exc\n",
        f"{FARM}/test_outbox.py",
    ),
    Mutant(
        "F-40", "rows are published in a transaction", "farm/outbox.py",
        "    with unit_of_work(engine) as conn:\n        rows = _lease(conn)\n    sent: list[int] = []\n",
        "    rows = (conn := engine.connect()).execute(select(outbox.c.id, outbox.c.payload)"
        ".where(outbox.c.sent_at.is_(None)).with_for_update()).all()\n    sent: list[int] = []\n",
        f"{FARM}/test_outbox.py",
    ),
    Mutant(
        "F-41", "claims wait for accounts", "farm/jobs/claim.py",
        "FOR UPDATE OF u SKIP LOCKED", "FOR UPDATE OF u",
        f"{JOBS}/test_claim.py",
    ),
    Mutant(
        "F-41", "claims wait for jobs", "farm/jobs/claim.py",
        "FOR UPDATE SKIP LOCKED) head", "FOR UPDATE) head",
        f"{JOBS}/test_claim.py",
    ),
    Mutant(
        "F-41", "empty claims keep their locks", "farm/jobs/claim.py",
        "        savepoint.rollback()\n        if row is None:",
        "        savepoint.commit()\n        if row is None:",
        f"{JOBS}/test_claim.py",
    ),
    Mutant(
        "F-12", "max_running is looked at without the lock", "farm/jobs/claim.py",
        "          AND u.running < coalesce((a.limits->>'max_running')::int, :max_running)\n"
        "        ORDER BY",
        "        ORDER BY",
        f"{JOBS}/test_claim.py",
    ),
    Mutant(
        "11.2", "a backoff is not waited for", "farm/jobs/claim.py",
        "AND j.profile = :profile AND j.not_before <= now()", "AND j.profile = :profile",
        f"{JOBS}/test_claim.py::test_a_job_in_backoff_is_left_alone_until_its_time",
    ),
    Mutant(
        "11.2", "jobs of a newer contract are taken", "farm/jobs/claim.py",
        "    AND j.contract_version = ANY(:versions)\n", "    AND :versions IS NOT NULL\n",
        f"{JOBS}/test_claim.py",
    ),
    Mutant(
        "11.2", "no fair share", "farm/jobs/claim.py",
        "(head.priority >= :urgent) DESC, u.running, head.rank_at",
        "(head.priority >= :urgent) DESC, head.rank_at",
        f"{JOBS}/test_claim.py",
    ),
    Mutant(
        "11.2", "priority is no head start", "farm/jobs/submit.py",
        "head_start=submission.priority * PRIORITY_HEAD_START", "head_start=0 * PRIORITY_HEAD_START",
        f"{JOBS}/test_claim.py",
    ),
    Mutant(
        "11.3", "beats without alive ranks", "worker/heartbeat.py",
        "        if stall:\n            return\n", "",
        f"{WORKER}/test_agent.py::test_frozen_rank_loses_its_lease_under_a_healthy_agent",
    ),
    Mutant(
        "11.3", "ticks count as progress", "worker/liveness.py",
        "        if seen != (self.marks, self.phase, self.step):", "        if seen:",
        "tests/unit/worker/test_liveness.py",
    ),
    Mutant(
        "11.3", "a lease never ends by itself", "worker/heartbeat.py",
        "if not self._lost and self._clock() >= self._until:", "if not self._clock:",
        "tests/unit/worker/test_lease.py",
    ),
    Mutant(
        "11.3", "a beat counts from its answer", "worker/heartbeat.py",
        "lease.renew(sent_at, answer)", "lease.renew(monotonic_s() + 3600, answer)",
        f"{WORKER}/test_agent.py::test_database_that_stays_away_ends_the_render_with_the_lease",
    ),
    Mutant(
        "11.3", "a lost lease is not noticed", "worker/heartbeat.py",
        "            lease.lose(\"the database has given the job to somebody else or ended it\")",
        "            lease.renew(sent_at, Beat(30.0, False, False, None))",
        "tests/chaos/test_worker_loss.py"
        "::test_worker_stops_its_ranks_as_soon_as_it_hears_that_the_job_is_not_its_own",
    ),
    Mutant(
        "11.3", "lease losses have no cap", "farm/jobs/policy.py",
        "    if job.infra_losses >= case.rules.max_infra_losses:\n", "    if job.infra_losses < 0:\n",
        "tests/unit/farm/jobs/test_policy.py",
    ),
    Mutant(
        "11.3", "lease losses use up the user's budget", "farm/jobs/job.py",
        "return self.attempts - self.infra_losses - self.preemptions", "return self.attempts",
        "tests/unit/farm/jobs/test_job.py",
    ),
    Mutant(
        "11.4", "a rank that ends leaves the others", "worker/group.py",
        "        ranks = list(self._ranks)\n        self.kill()\n        evidence",
        "        ranks = list(self._ranks)\n        evidence",
        f"{WORKER}/test_group.py::test_loading_that_takes_too_long_is_a_failure",
    ),
    Mutant(
        "11.4", "ranks are started again for ever", "worker/restarts.py",
        "max_restarts: int = 3", "max_restarts: int = 3000",
        "tests/unit/worker/test_restarts.py",
    ),
    Mutant(
        "11.4", "any process with the number is killed", "worker/group_folder.py",
        "return ProcessMark.of(self.pid) == self", "return ProcessMark.of(self.pid) is not None",
        "tests/unit/worker/test_group_folder.py",
    ),
    Mutant(
        "11.8", "a second order to leave is not heard", "worker/agent.py",
        "        if self._leave_now.is_set():\n            return True\n", "",
        f"{WORKER}/test_agent.py::test_second_order_to_drain_gives_the_job_back_at_once",
    ),
    Mutant(
        "10", "rings where rings already wait", "farm/jobs/rering.py",
        "    if has_unsent(conn):\n        return 0\n", "",
        f"{JOBS}/test_rering.py",
    ),
    Mutant(
        "12", "two tickers do the same sweep", "worker/sweeps.py",
        "        yield conn if conn.execute(select(lock)).scalar_one() else None",
        "        conn.execute(select(lock))\n        yield conn",
        f"{WORKER}/test_sweeps.py",
    ),
    Mutant(
        "F-45", "a wave of some of its members", "farm/jobs/wave_claim.py",
        "        if len(rows) == len(choice.members):\n", "        if rows:\n",
        f"{JOBS}/test_wave_claim.py",
    ),
    Mutant(
        "F-45", "waves mix keys", "farm/jobs/wave_claim.py",
        "by_key[candidate.wave_key].append(candidate)", "by_key[\"\"].append(candidate)",
        "tests/unit/farm/jobs/test_wave_choice.py",
    ),
    Mutant(
        "F-45", "waves do not wait to be filled", "farm/jobs/wave_claim.py",
        "Choice(members, \"pad\").waited_s >= control.wave_max_wait_s:", "members:",
        "tests/unit/farm/jobs/test_wave_choice.py",
    ),
    Mutant(
        "F-45", "poison keeps its neighbours", "farm/jobs/wave_claim.py",
        "        if not candidate.is_alone:\n", "        if candidate:\n",
        "tests/unit/farm/jobs/test_wave_choice.py",
    ),
    Mutant(
        "F-46", "a crash beside neighbours is the job's own", "farm/jobs/policy.py",
        "    if case.failure.neighbours:\n"
        "        return _agent_lost(case)  # nobody knows yet whose crash it was\n",
        "",
        "tests/unit/farm/jobs/test_policy.py",
    ),
    Mutant(
        "F-46", "poison on two groups goes on", "farm/jobs/policy.py",
        "if crashes >= POISON_CRASHES or len(groups) >= POISON_CRASHES_APART:",
        "if crashes >= POISON_CRASHES:",
        "tests/unit/farm/jobs/test_policy.py",
    ),
    Mutant(
        "F-46", "poison on one group goes on", "farm/jobs/policy.py",
        "if crashes >= POISON_CRASHES or len(groups)", "if len(groups)",
        "tests/unit/farm/jobs/test_policy.py",
    ),
    Mutant(
        "F-46", "poison is not kept", "farm/jobs/lifecycle.py",
        "(action.error or {}).get(\"code\") == \"poison_job\":",
        "(action.error or {}).get(\"code\") == \"\":",
        f"{FARM}/test_quarantine.py",
    ),
)  # fmt: skip
