"""The agent: one loop in one thread that takes a job, has its group render it, and finishes it.

`ring` and the poll wake the loop; `drain` ends it. What operators wish of the group comes with the heartbeat;
a drain that was wished for can be taken back while the last job runs, one by a signal cannot. The loop's
thread starts the ranks, so it must live as long as the process. Everything here works without Celery, and
nothing here imports torch: `run_job` is the path of a job from its claim to its last transaction.
"""

import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError
from structlog.contextvars import bound_contextvars

from farm import groups, waves
from farm.clock import monotonic_s
from farm.db.session import make_engine, unit_of_work
from farm.groups import Group, Wish
from farm.ids import new_id
from farm.jobs.claim import claim
from farm.jobs.job import Claimed
from farm.jobs.policy import Failure, FailureKind
from farm.jobs.wave_claim import ClaimedWave, claim_wave
from farm.metrics.families import DOORBELLS
from farm.profiles import Profile, Profiles
from farm.progress import ProgressPublisher
from farm.settings import Settings
from farm.storage import ObjectStore
from farm.tracing import log_members
from magi2.contract import CONTRACT_VERSION, GenerationRequest
from worker import outputs
from worker.attempt import (
    Attempt,
    AttemptFailedError,
    CanceledError,
    LeaseLostError,
    PreemptedError,
    Stopwatch,
    Tools,
    plain,
)
from worker.devices import DeviceError, check_deterministic, check_devices
from worker.engine_api import RenderRequest, RenderResult
from worker.group import GpuGroup, GroupCrashError, GroupSpec, GroupStuckError, GroupTimes
from worker.group_folder import take_folder
from worker.health import BusyTime, HealthMonitor
from worker.heartbeat import Heartbeat, Lease
from worker.measure import MemoryWatch
from worker.nvml import DeviceReader
from worker.registration import register_when_wanted
from worker.restarts import RestartPolicy
from worker.warm_up import WarmUpFailedError, warm_up
from worker.wave import WaveWork

log = structlog.get_logger(__name__)

POLL_S = 5.0
POLL_JITTER = 0.2
WISH_RETRY_S = 2.0
CONTRACT_VERSIONS = (CONTRACT_VERSION,)


class AgentError(Exception):
    """The agent cannot go on; the message says why."""


@dataclass(frozen=True)
class AgentConfig:
    """What an agent serves, with what, and how patient it is."""

    profile: Profile
    profiles: Profiles
    devices: tuple[int, ...]
    engine: str
    environment: Mapping[str, str]
    times: GroupTimes = field(default_factory=GroupTimes)
    poll_s: float = POLL_S
    restart_pauses_s: tuple[float, ...] = RestartPolicy.pauses_s


class Agent:
    """One group of one profile, from registration to the last job."""

    def __init__(
        self,
        settings: Settings,
        config: AgentConfig,
        *,
        on_drain: Callable[[], None] = lambda: None,
        on_resume: Callable[[], None] = lambda: None,
    ) -> None:
        """Check that profile, devices and environment fit, and take the group's folder.

        `on_drain` is called when doorbells need no longer be listened to, `on_resume` when they must again.

        Raises:
            DeviceError: They do not fit, or another agent holds a device.
        """
        check_devices(config.profile.name, config.profile.devices, config.devices)
        check_deterministic(config.environment, deterministic=config.profile.deterministic)
        self._settings = settings
        self._config = config
        self._on_drain = on_drain
        self._on_resume = on_resume
        self._folder = take_folder(settings.state_dir, config.profile.name, config.devices)
        self.group = GpuGroup(_group_spec(config, self._folder.log_dir), config.times)
        self._restarts = RestartPolicy(pauses_s=config.restart_pauses_s)
        self._health = HealthMonitor(DeviceReader(config.devices))
        self._busy_time = BusyTime()
        self._database = make_engine(settings, application="agent", pool_size=2)
        self._row = Group(
            id=self._folder.group_id,
            host=socket.gethostname(),
            profile=config.profile.name,
            devices=",".join(str(device) for device in config.devices),
            boot_id=new_id("boot"),
            deterministic=config.profile.deterministic,
            contract_versions=CONTRACT_VERSIONS,
        )
        self._heartbeat = Heartbeat(
            make_engine(settings, application="agent", pool_size=1),
            self._row,
            interval_s=settings.worker.heartbeat_s,
            rules=settings.rules(),
            stall=self.group.stall,
            on_wanted=self._on_wanted,
            stats=self._stats,
        )
        self._wake = threading.Event()
        self._leave = threading.Event()
        self._leave_now = threading.Event()
        self._leaving_at: float | None = None
        self.next_profile: str | None = None  # what this process shall serve after this agent
        self._is_leaving_by_wish = False
        self._is_restart_wanted = False
        self._sickness = ""
        self._is_paused = False
        self._is_busy = False
        self._was_rung = False
        self._was_started = False
        self._tools = self._make_tools()

    @property
    def group_id(self) -> str:
        """Id of the group, the same over restarts of the agent."""
        return self._row.id

    @property
    def is_leaving(self) -> bool:
        """Tell whether a drain has begun."""
        return self._leave.is_set()

    def ring(self, job_id: str, profile: str) -> None:
        """Wake the loop; called by the task, from any thread, and returns at once."""
        log.debug("doorbell", job_id=job_id, profile=profile)
        self._was_rung = True
        self._wake.set()

    def drain(self, *, now: bool = False) -> None:
        """Stop claiming; finish the current job within the grace, or give it back at once."""
        if self._leaving_at is None:
            log.info("drain", group=self.group_id)
            self._leaving_at = monotonic_s()
            self._leave.set()
            self._show()
            self._on_drain()
        if now:
            self._leave_now.set()
        self._wake.set()

    def run_forever(self) -> None:
        """Serve until drained; this thread starts the ranks and must live as long as the process.

        Raises:
            AgentError: The engine refuses to load, or the agent itself is broken.
        """
        try:
            self._settle_in()
            while not self.is_leaving:
                self._turn()
            self.next_profile = self._read_next()
        except (AgentError, DeviceError) as error:
            raise AgentError(str(error)) from error
        except Exception as error:
            log.error("agent_broke", exc_info=error)
            raise AgentError(f"the agent broke on {type(error).__name__}; see the log") from error
        finally:
            self._move_out()

    def run_job(self, claimed: Claimed, lease: Lease) -> None:
        """Take one claimed job to the end of this attempt."""
        attempt = self._attempt(claimed, lease)
        with self._working_on(attempt):
            request = attempt.fetch_input()
            rendered = self._render(attempt, request)
            output = outputs.check_output(attempt, rendered)
            result = outputs.upload(attempt, output, self.group.fingerprint)
            outputs.succeed(attempt, result)

    def run_wave(self, wave: ClaimedWave, leases: Sequence[Lease]) -> None:
        """Take the members of a claimed wave to the ends of their attempts."""
        attempts = [self._attempt(*held) for held in zip(wave.members, leases, strict=True)]
        for attempt in attempts:
            attempt.neighbours = len(attempts) - 1
        work = WaveWork(wave.id, attempts, self.group, self._guarding, self._measuring)
        self._is_busy = True
        self._show()
        self._heartbeat.hold(*leases)
        with bound_contextvars(wave=wave.id, group=self.group_id):
            log.info("wave_claimed", jobs=[attempt.claimed.job.id for attempt in attempts])
            try:
                work.run()
            except Exception as error:  # noqa: BLE001 - the edge of a wave, as of a job
                for attempt in attempts:
                    if not attempt.is_over:
                        self._end_early(attempt, error)
            finally:
                self._heartbeat.hold()
                for attempt in attempts:
                    self._tools.publisher.clear(attempt.lease.job_id)
                    attempt.close()
            self._end_wave(wave, work)
        self._is_busy = False
        self._show()

    def _end_wave(self, wave: ClaimedWave, work: WaveWork) -> None:
        if self.group.is_ready:
            self._restarts.finished_run()
        num_ghosts = wave.num_slots - work.num_rendered
        log.info("wave_ended", outcome=work.outcome, num_ghosts=num_ghosts)
        try:
            with unit_of_work(self._database) as conn:
                waves.end_wave(conn, wave.id, work.outcome, num_ghosts)
        except SQLAlchemyError as error:  # only a figure for people
            log.warning("wave_not_recorded", err=type(error).__name__)

    def _attempt(self, claimed: Claimed, lease: Lease) -> Attempt:
        folder = self._folder.work_dir / f"{claimed.job.id}.e{claimed.epoch}"
        return Attempt(claimed, lease, folder, self._tools)

    @contextmanager
    def _guarding(self, attempt: Attempt) -> Iterator[None]:
        """Record the early end of one member of a wave, whatever it is; the others go on."""
        with bound_contextvars(job_id=attempt.lease.job_id, epoch=attempt.lease.epoch):
            try:
                yield
            except Exception as error:  # noqa: BLE001 - the edge of a job
                self._end_early(attempt, error)
                attempt.is_over = True
            if attempt.is_over:
                self._heartbeat.let_go(attempt.lease)

    @contextmanager
    def _working_on(self, attempt: Attempt) -> Iterator[None]:
        """Keep the lease and the folder of an attempt, and record its end whatever happens in it."""
        job = attempt.claimed.job
        self._is_busy = True
        self._show()
        self._heartbeat.hold(attempt.lease)
        traced = log_members(job.traceparent)
        with bound_contextvars(job_id=job.id, epoch=job.epoch, group=self.group_id, **traced):
            log.info("job_claimed", profile=job.profile)
            try:
                attempt.open()
                yield
                log.info("job_succeeded", timings=attempt.timings)
            except Exception as error:  # noqa: BLE001 - the edge of a job: one defect must not end the agent
                self._end_early(attempt, error)
            finally:
                self._heartbeat.hold()
                self._tools.publisher.clear(job.id)
                attempt.close()
        self._is_busy = False
        self._show()

    def _render(self, attempt: Attempt, request: RenderRequest) -> RenderResult:
        """Have the ranks render, and turn whatever is no clip into the way in which the attempt ends."""
        with Stopwatch(attempt, "render"), self._measuring(attempt):
            outcomes = self.group.run(
                [request], attempt.token, on_progress=attempt.take, stop=attempt.stop_order
            )
        if self.group.is_ready:
            self._restarts.finished_run()
        return attempt.accept(outcomes[request.request_id])

    @contextmanager
    def _measuring(self, *attempts: Attempt) -> Iterator[None]:
        """Keep the peaks of memory with the attempts, if an operator asked for them."""
        if not self._settings.worker.measure:
            yield
            return
        watch = MemoryWatch(self._health.device_memory_mb)
        for attempt in attempts:  # at once: a member of a wave may end before the others
            attempt.peaks = watch.peaks
        with watch:
            yield

    def _end_early(self, attempt: Attempt, error: Exception) -> None:
        """Record an end without a result, if the job is still ours."""
        try:
            match error:
                case LeaseLostError():
                    log.warning("lease_lost", err=str(error))
                case CanceledError():
                    attempt.finish_cancel()
                case PreemptedError():
                    attempt.give_back()
                case AttemptFailedError():
                    attempt.fail(error.failure)
                case GroupCrashError() | GroupStuckError():
                    log.error("group_crashed", err=str(error))
                    if isinstance(error, GroupStuckError):
                        self._fall_sick(str(error))
                    detail = plain({"error": str(error), **getattr(error, "evidence", {})})
                    attempt.fail(Failure(FailureKind.CRASH, detail=detail, neighbours=attempt.neighbours))
                case _:
                    log.error("attempt_broke", exc_info=error)
                    attempt.fail(Failure(FailureKind.INTERNAL, detail=plain({"error": repr(error)})))
        except (LeaseLostError, SQLAlchemyError) as late:
            log.warning("end_not_recorded", err=str(late) or type(late).__name__)

    def _turn(self) -> None:
        """Do one thing: wait, start the ranks, or take a job to its end."""
        if not self._heartbeat.is_alive:
            raise AgentError("the heartbeat thread has died; see the log")
        if self._is_restart_wanted:
            self._restart_ranks()
        if self._is_paused or self._restarts.is_sick or not self._is_healthy():
            self._sleep()
            return
        if not self._ensure_ranks():
            return
        if not (self._take_wave() if self.group.spec.num_slots > 1 else self._take_job()):
            self._sleep()

    def _ensure_ranks(self) -> bool:
        """Start the ranks unless they are loaded and answer; False if they are not there yet."""
        if self.group.is_ready and self.group.answers():
            return True
        if self._was_started and not self._pause_before_restart():
            return False
        self._was_started = True
        self._show()
        try:
            is_loaded = self.group.start(give_up=lambda: self.is_leaving, on_started=self._folder.record)
            if is_loaded and self._config.profile.warm_up:
                warm_up(self.group, self._folder.work_dir)
        except WarmUpFailedError as error:
            log.error("warm_up_failed", err=str(error))
            return False
        except GroupCrashError as crash:
            log.error("ranks_not_loaded", err=str(crash), tail=crash.evidence.get("log"))
            if crash.evidence.get("refused"):
                raise AgentError(f"the engine refuses to load: {crash}") from crash
            return False
        except GroupStuckError as error:
            self._fall_sick(str(error))
            is_loaded = False
        self._show()
        return is_loaded

    def _pause_before_restart(self) -> bool:
        """Wait as the policy says; False if the group is sick by now, or leaves."""
        pause_s = self._restarts.failed()
        self._show()
        if pause_s is None:
            self._fall_sick("the ranks had to be restarted too often")
            return False
        log.warning("ranks_restart", group=self.group_id, pause_s=pause_s)
        return not self._leave.wait(pause_s)

    def _is_healthy(self) -> bool:
        """Look at the devices; a group whose devices cannot be trusted falls sick before it claims again."""
        problem = self._health.check()
        if problem:
            self._fall_sick(problem)
        return not problem

    def _fall_sick(self, reason: str) -> None:
        """Claim nothing more until an operator restarts the ranks, or the agent."""
        if not self._sickness:
            log.error("group_sick", group=self.group_id, err=reason, alarm=True)
        self._restarts.is_sick = True
        self._sickness = self._sickness or reason
        self._show()

    def _restart_ranks(self) -> None:
        """Do what an operator wished for: kill the ranks, forget why the group was sick, and load anew."""
        self._is_restart_wanted = False
        log.info("ranks_restart_wanted", group=self.group_id)
        try:
            self.group.kill()
        except GroupStuckError as error:
            self._fall_sick(str(error))
        else:
            self._restarts.recover()
            self._sickness = ""
            self._was_started = False
        self._show()
        try:
            with unit_of_work(self._database) as conn:
                groups.forget_wish(conn, self.group_id, self._row.boot_id, Wish.RESTARTING)
        except SQLAlchemyError as error:  # then they are restarted once more
            log.warning("wish_not_forgotten", err=type(error).__name__)

    def _stats(self) -> dict[str, Any]:
        """Return what the group's row says beside its state."""
        return {
            **self._health.stats(),
            "busy_1h": self._busy_time.ratio(),
            "restarts": self._restarts.num_restarts,
            "sick_reason": self._sickness,
        }

    def _take_job(self) -> bool:
        """Claim a job and work on it; False if there is none."""
        sent_at = monotonic_s()
        try:
            with unit_of_work(self._database) as conn:
                claimed = claim(conn, *self._claimant(), rules=self._settings.rules())
        except SQLAlchemyError as error:
            log.warning("claim_failed", err=type(error).__name__)
            return False
        self._count_doorbell(is_claimed=claimed is not None)
        if claimed is not None:
            self.run_job(claimed, Lease(claimed, sent_at))
        return claimed is not None

    def _count_doorbell(self, *, is_claimed: bool) -> None:
        """Count a ring by what the claim after it found; several rings before one claim are one."""
        if self._was_rung:
            self._was_rung = False
            DOORBELLS.labels("claimed" if is_claimed else "empty").inc()

    def _take_wave(self) -> bool:
        """Claim a wave and work on it; False if none is ready."""
        sent_at = monotonic_s()
        try:
            with unit_of_work(self._database) as conn:
                wave = claim_wave(
                    conn,
                    *self._claimant(),
                    num_slots=self.group.spec.num_slots,
                    rules=self._settings.rules(),
                )
        except SQLAlchemyError as error:
            log.warning("claim_failed", err=type(error).__name__)
            return False
        self._count_doorbell(is_claimed=wave is not None)
        if wave is not None:
            self.run_wave(wave, [Lease(claimed, sent_at) for claimed in wave.members])
        return wave is not None

    def _claimant(self) -> tuple[str, str, str, tuple[int, ...]]:
        return self.group_id, self._config.profile.name, self._row.boot_id, CONTRACT_VERSIONS

    def _sleep(self) -> None:
        """Wait for a ring or for the next poll; the jitter keeps agents apart."""
        jitter = random.uniform(1 - POLL_JITTER, 1 + POLL_JITTER)  # noqa: S311 - spreads polls
        self._wake.wait(self._config.poll_s * jitter)
        self._wake.clear()

    def _settle_in(self) -> None:
        """Clear up after a predecessor, write the group's row, and start the heartbeat."""
        killed = self._folder.tidy()
        if killed:
            log.warning("orphans_killed", pids=killed)
        database, row, leave = self._database, self._row, self._leave
        if register_when_wanted(database, row, leave, on_drain=self._on_drain, on_resume=self._on_resume):
            self._health.start()
            self._heartbeat.start()

    def _move_out(self) -> None:
        """Free the devices and say goodbye."""
        self._is_leaving_by_wish = False  # too late to take it back
        try:
            self.group.close()
        except GroupStuckError as error:
            log.error("ranks_stuck", err=str(error))
            self.next_profile = None  # they still hold the devices
        self._heartbeat.stop("gone")
        self._health.stop()
        self._tools.publisher.close()
        self._database.dispose()
        self._folder.record([])
        self._folder.release()
        log.info("agent_left", group=self.group_id)

    def _show(self) -> None:
        """Tell the group's row what the agent is doing."""
        fingerprint = self.group.fingerprint or None
        self._busy_time.note(is_busy=self._is_busy)
        if self._restarts.is_sick:
            state = "sick"
        elif self.is_leaving:
            state = "draining"
        elif not self.group.is_ready:
            state = "booting"
        elif self._is_busy:
            state = "busy"
        else:
            state = "paused" if self._is_paused else "ready"
        self._heartbeat.show(state, fingerprint)

    def _on_wanted(self, wanted: str | None) -> None:
        """Obey an operator; called by the heartbeat with every answer."""
        if wanted == "gone":
            log.error("group_taken_over", group=self.group_id)
            self.drain(now=True)
        elif wanted in {Wish.DRAINING, Wish.LEAVING, Wish.CHANGING}:
            self._is_leaving_by_wish |= not self.is_leaving
            self.drain(now=wanted == Wish.LEAVING)
        else:
            self._undrain()
            self._is_restart_wanted |= wanted == Wish.RESTARTING
            if self._is_paused != (wanted == Wish.PAUSED):
                self._is_paused = wanted == Wish.PAUSED
                self._show()
            if wanted:
                self._wake.set()

    def _undrain(self) -> None:
        """Take a drain back that an operator had wished for and no longer wants."""
        if self._is_leaving_by_wish and self.is_leaving:
            log.info("undrain", group=self.group_id)
            self._is_leaving_by_wish = False
            self._leaving_at = None
            self._leave_now.clear()
            self._leave.clear()
            self._show()
            self._on_resume()

    def _read_next(self) -> str | None:
        """Return the profile that an operator wants next; None if the agent leaves for another reason."""
        while self._is_leaving_by_wish and not self._leave_now.is_set():
            try:
                with unit_of_work(self._database) as conn:
                    return groups.wanted_profile(conn, self.group_id, self._row.boot_id)
            except SQLAlchemyError as error:
                log.warning("wish_not_read", err=type(error).__name__)
                self._leave_now.wait(WISH_RETRY_S)
        return None

    def _must_leave(self) -> bool:
        """Tell whether the current job must be given back now."""
        if self._leave_now.is_set():
            return True
        own = self._settings.worker
        stop_grace_s = own.drain_grace_s if own.stop_grace_s is None else own.stop_grace_s
        grace_s = own.drain_grace_s if self._is_leaving_by_wish else stop_grace_s
        return self._leaving_at is not None and monotonic_s() - self._leaving_at >= grace_s

    def _roomier(self, request: GenerationRequest) -> str | None:
        """Find a live profile that needs less device memory than ours."""
        with unit_of_work(self._database) as conn:
            live = groups.live_profiles(conn)
        return self._config.profiles.roomier(self._config.profile.name, live, request)

    def _make_tools(self) -> Tools:
        return Tools(
            database=self._database,
            store=ObjectStore(self._settings),
            publisher=ProgressPublisher(self._settings.redis_url),
            rules=self._settings.rules(),
            limits=self._config.profile.limits(),
            roomier=self._roomier,
            must_leave=self._must_leave,
            pause=self._leave_now.wait,
        )


def _group_spec(config: AgentConfig, log_dir: Path) -> GroupSpec:
    return GroupSpec(
        profile=config.profile.name,
        engine=config.engine,
        devices=config.devices,
        world=max(config.profile.world, config.profile.devices),
        ckpt_root=config.environment.get("MAGI2_CKPT_ROOT"),
        deterministic=config.profile.deterministic,
        environment=config.environment,
        log_dir=log_dir,
        layout=config.profile.layout,
    )
