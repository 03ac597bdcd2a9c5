"""A wave: the attempts that one group runs side by side, from their claim to the end of each.

Each member goes its own way as far as it can: one with bad input, or that is called off, leaves and its slot
becomes a ghost, and the others finish. Only what concerns the ranks concerns all: a crash, a stall, an agent
that must leave. Members are known by their tokens, never by their place. How an attempt that raises is ended
is the agent's business (`guard`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace

from worker import outputs
from worker.attempt import Attempt, Stopwatch
from worker.board import WorkReport
from worker.engine_api import Outcome, RenderRequest, Stopped
from worker.group import GpuGroup, GroupCrashError, GroupStuckError, Members, Stop

Guard = Callable[[Attempt], AbstractContextManager[None]]
"""A context that records the early end of an attempt, instead of raising it, and marks it as over."""


@dataclass
class WaveWork:
    """The work on one wave; `run` is called once, in the supervisor's thread."""

    token: str
    attempts: Sequence[Attempt]
    group: GpuGroup
    guard: Guard
    measuring: Callable[..., AbstractContextManager[None]]
    outcome: str = "ended"
    num_rendered: int = 0
    _requests: dict[str, RenderRequest] = field(default_factory=dict)
    _called_off: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Take every member to the end of its attempt."""
        self._prepare()
        self._validate()
        if self._live():
            self._render_and_store()

    def _live(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if not attempt.is_over]

    def _prepare(self) -> None:
        """Check and fetch what each member needs; its place in the claim is its slot."""
        for slot, attempt in enumerate(self.attempts):
            with self.guard(attempt):
                attempt.open()
                self._requests[attempt.token] = replace(attempt.fetch_input(), slot=slot)

    def _validate(self) -> None:
        """Let the engine refuse members on the host, before any rank begins with the wave."""
        live = self._live()
        if not live:
            return
        try:
            requests = [self._requests[attempt.token] for attempt in live]
            refused = self.group.validate(requests, self.token)
        except (GroupCrashError, GroupStuckError) as error:
            self._crash(live, error)
            return
        for attempt in live:
            if attempt.token in refused:
                with self.guard(attempt):
                    attempt.accept(refused[attempt.token])

    def _render_and_store(self) -> None:
        members = self._live()
        for attempt in members:
            attempt.neighbours = len(members) - 1
        try:
            outcomes = self._render(members)
        except (GroupCrashError, GroupStuckError) as error:
            self._crash(self._live(), error)
            return
        for attempt in self._live():
            with self.guard(attempt):
                self._store(attempt, outcomes[attempt.token])

    def _render(self, members: Sequence[Attempt]) -> dict[str, Outcome]:
        by_token = {attempt.token: attempt for attempt in members}

        def take(report: WorkReport) -> None:
            attempt = by_token[report.request_id]
            if not attempt.is_over:
                attempt.take(report)

        def drop(token: str) -> None:
            # The ranks have let go of it; what ends it (a cancel, a lost lease, its deadline) is known.
            attempt = by_token[token]
            if not attempt.is_over:
                with self.guard(attempt):
                    attempt.accept(Stopped())

        with ExitStack() as watches:
            for attempt in members:
                watches.enter_context(Stopwatch(attempt, "render"))
            watches.enter_context(self.measuring(*members))
            return self.group.run(
                [self._requests[attempt.token] for attempt in members],
                self.token,
                on_progress=take,
                stop=self._stop_order,
                members=Members(lambda: frozenset(self._called_off), drop),
            )

    def _stop_order(self) -> Stop:
        """Ask all members; the ranks stop together only when nobody wants them to go on."""
        live = self._live()
        orders = {attempt.token: attempt.stop_order() for attempt in live}
        if Stop.NOW in orders.values():
            # Either the agent must leave, or a rank hangs and with it the leases of all.
            is_lost = any(attempt.lease.lost for attempt in live)
            self.outcome = "crashed" if is_lost else "given_back"
            return Stop.NOW
        leaving = {token for token, order in orders.items() if order is Stop.AT_STEP}
        if len(leaving) == len(live):
            return Stop.AT_STEP
        self._called_off |= leaving
        return Stop.GO_ON

    def _store(self, attempt: Attempt, outcome: Outcome) -> None:
        output = outputs.check_output(attempt, attempt.accept(outcome))
        result = outputs.upload(attempt, output, self.group.fingerprint)
        outputs.succeed(attempt, result)
        attempt.is_over = True
        self.num_rendered += 1

    def _crash(self, members: Sequence[Attempt], error: GroupCrashError | GroupStuckError) -> None:
        self.outcome = "crashed"
        for attempt in members:
            with self.guard(attempt):
                raise error
