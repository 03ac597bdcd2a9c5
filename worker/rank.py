"""`python -m worker.rank`: one process per device, which loads an engine and stays warm between jobs.

The main thread does nothing but the engine's work. A second thread reads the agent's messages, so that a
cancel, a ping or the agent's end is seen while the engine computes. A third sends a tick a second; a
tick carries a count that only the main thread moves (each report, each question of `should_stop`, each
turn of the idle loop), so a rank that hangs still ticks but shows no progress, and a rank whose
interpreter is stuck does not tick at all. Anything but a typed engine fault ends the process: the agent
restarts the group.
"""

import argparse
import ctypes
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from worker import protocol
from worker.engine_api import (
    Engine,
    EngineFault,
    InvalidInput,
    LoadRefusedError,
    LoadSpec,
    Outcome,
    OutOfMemory,
    RenderRequest,
    RenderResult,
    fault_to_json,
    make_engine,
    num_slots_of,
    output_rank,
)
from worker.protocol import Message, ProtocolError, Writer, members_of

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends; leave if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(protocol.CRASH_EXIT_CODE)


@dataclass
class WorkMeter:
    """How far the main thread has come; written by it alone, read by the ticking thread."""

    marks: int = 0
    phase: str = protocol.IDLE_PHASE
    step: int = 0

    def mark(self, phase: str | None = None, step: int | None = None) -> None:
        """Count one sign of life of the main thread."""
        if phase is not None:
            self.phase = phase
        if step is not None:
            self.step = step
        self.marks += 1


class RunSignal:
    """What the agent has called off of one run; asked by the engine, filled by the control thread."""

    def __init__(self, rank: "Rank", token: str) -> None:
        self._rank = rank
        self._token = token
        self._told: frozenset[str] = frozenset()

    def __call__(self) -> bool:
        """Tell whether the whole run was called off."""
        return self._rank.is_canceled(self._token)

    def dropped(self) -> frozenset[str]:
        """Return the requests that were called off; the agent is told once the engine knows."""
        names = self._rank.dropped_of(self._token)
        if names != self._told:
            self._rank.confirm_dropped(self._token, names)
            self._told = names
        return names


class Rank:
    """One rank: its pipe ends, its engine, and the loop that serves messages until `exit`."""

    def __init__(self, rank: int, control_fd: int, events: Writer) -> None:
        self._rank = rank
        self._control_fd = control_fd
        self._events = events
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._meter = WorkMeter()
        self._canceled_token = ""
        self._dropped: tuple[str, frozenset[str]] = ("", frozenset())
        self._token = ""
        self._answers_for: frozenset[str] = frozenset()
        self._num_slots = self._world = 1
        self._engine: Engine | None = None

    def serve(self) -> int:
        """Serve until told to leave; return the exit status."""
        self._events.send(protocol.HELLO, pid=os.getpid())
        threading.Thread(target=self._read_control, name="control", daemon=True).start()
        threading.Thread(target=self._tick_forever, name="tick", daemon=True).start()
        try:
            self._serve_messages()
        except Exception as error:  # noqa: BLE001 - the process boundary: whatever is not typed is a crash
            return self._crash(error)
        return 0

    def _serve_messages(self) -> None:
        while True:
            try:
                message = self._inbox.get(timeout=protocol.TICK_S)
            except queue.Empty:
                self._meter.mark(protocol.IDLE_PHASE, 0)
                continue
            if message["type"] == protocol.EXIT:
                break
            if message["type"] == protocol.LOAD:
                self._load(message)
            elif message["type"] == protocol.VALIDATE:
                self._validate(message)
            else:
                self._run(message)
            self._meter.mark(protocol.IDLE_PHASE, 0)
        if self._engine is not None:
            self._engine.close()

    def _load(self, message: Message) -> None:
        name, spec = members_of(message, "engine", "spec")
        self._meter.mark("load", 0)
        engine = make_engine(name)
        loaded = LoadSpec(**spec | {"devices": tuple(spec["devices"])})
        engine.load(loaded, self._report)
        self._engine, self._world, self._num_slots = engine, loaded.world, num_slots_of(loaded.layout)
        self._events.send(protocol.READY, fingerprint=engine.fingerprint())

    def _run(self, message: Message) -> None:
        token, requests = members_of(message, "token", "requests")
        self._token = token
        wanted = [RenderRequest(**request) for request in requests]
        self._answers_for = frozenset(
            request.request_id
            for request in wanted
            if output_rank(request.slot, self._world, self._num_slots) == self._rank
        )
        outcomes = self._render(wanted)
        wire = {name: _outcome_to_json(outcome) for name, outcome in outcomes.items()}
        kind = protocol.RESULT if self._rank == 0 else protocol.DONE
        self._events.send(kind, token=token, outcomes=wire)

    def _validate(self, message: Message) -> None:
        """Say which requests the engine would refuse, before any rank begins with any of them."""
        token, requests = members_of(message, "token", "requests")
        refused = self._refusals([RenderRequest(**request) for request in requests])
        faults = {name: fault_to_json(fault) for name, fault in refused.items()}
        self._events.send(protocol.VALIDATED, token=token, faults=faults)

    def _refusals(self, requests: Sequence[RenderRequest]) -> dict[str, InvalidInput]:
        if self._engine is None:
            raise ProtocolError("a request came before load")
        refused: dict[str, InvalidInput] = {}
        for request in requests:
            try:
                self._engine.validate(request)
            except InvalidInput as fault:
                refused[request.request_id] = fault
        return refused

    def _render(self, requests: Sequence[RenderRequest]) -> dict[str, Outcome]:
        """Validate on the host, identically on every rank, then run what is left: one outcome per request."""
        refused = self._refusals(requests)
        outcomes: dict[str, Outcome] = dict(refused)
        accepted = [request for request in requests if request.request_id not in refused]
        if not accepted or self._engine is None:
            return outcomes
        try:
            outcomes |= self._engine.run(accepted, self._report, RunSignal(self, self._token))
        except EngineFault as fault:
            outcomes |= {request.request_id: fault for request in accepted}
        except MemoryError as error:
            shortage = OutOfMemory(None, None, f"out of host memory: {error}")
            outcomes |= {request.request_id: shortage for request in accepted}
        return outcomes

    def is_canceled(self, token: str) -> bool:
        """Tell whether this run was called off; asking is a sign of life."""
        self._meter.mark()
        return self._canceled_token == token

    def dropped_of(self, token: str) -> frozenset[str]:
        """Return the requests of this run that were called off one by one; asking is a sign of life."""
        self._meter.mark()
        of_token, names = self._dropped
        return names if of_token == token else frozenset()

    def confirm_dropped(self, token: str, names: frozenset[str]) -> None:
        """Tell the agent that the engine knows."""
        self._events.send(protocol.DROPPED, token=token, request_ids=sorted(names))

    def _report(self, request_id: str, phase: str, step: int, total: int) -> None:
        self._meter.mark(phase, step)
        if request_id in self._answers_for or (not request_id and self._rank == 0):
            self._events.send(
                protocol.PROGRESS,
                token=self._token,
                request_id=request_id,
                phase=phase,
                step=step,
                total=total,
            )

    def _tick_forever(self) -> None:
        pause = threading.Event()
        while not pause.wait(protocol.TICK_S):
            meter = self._meter
            try:
                self._events.send(protocol.TICK, marks=meter.marks, phase=meter.phase, step=meter.step)
            except ProtocolError:
                os._exit(protocol.CRASH_EXIT_CODE)

    def _read_control(self) -> None:
        """Serve what must not wait for the engine; the end of the pipe means that the agent is gone."""
        try:
            for message in protocol.read_messages(self._control_fd):
                if message["type"] == protocol.CANCEL:
                    self._take_cancel(message)
                elif message["type"] == protocol.PING:
                    self._events.send(protocol.PONG, n=message.get("n"))
                elif message["type"] in {protocol.LOAD, protocol.VALIDATE, protocol.RUN, protocol.EXIT}:
                    self._inbox.put(message)
                else:
                    raise ProtocolError(f"unknown message {message['type']!r}")
        except ProtocolError as error:
            os._exit(self._crash(error))
        os._exit(0)

    def _take_cancel(self, message: Message) -> None:
        (token,) = members_of(message, "token")
        names = message.get("request_ids")
        if names is None:
            self._canceled_token = token
            return
        of_token, before = self._dropped
        # One assignment: the engine's thread reads the pair.
        self._dropped = (token, before.union(names) if of_token == token else frozenset(names))

    def _crash(self, error: Exception) -> int:
        """Say why on the pipe and in the log, as far as either can still be written."""
        text = "".join(traceback.format_exception(error))
        sys.stderr.write(text)
        try:
            self._events.send(
                protocol.CRASH,
                at_s=time.monotonic(),
                phase=self._meter.phase,
                message=f"{type(error).__name__}: {error}",
                refused=isinstance(error, LoadRefusedError | ImportError),
                traceback=text,
            )
        except ProtocolError:
            sys.stderr.write("the agent is gone\n")
        sys.stderr.flush()
        return protocol.CRASH_EXIT_CODE


def _outcome_to_json(outcome: Outcome) -> Message:
    if isinstance(outcome, RenderResult):
        return {"path": outcome.path, "stats": dict(outcome.stats)}
    return {"fault": fault_to_json(outcome)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank on the pipe ends that the agent left open."""
    parser = argparse.ArgumentParser(prog="python -m worker.rank", description="one rank of a GPU group")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--event-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of the agent")
    options = parser.parse_args(argv)
    die_with_parent(options.parent)
    faulthandler.enable()
    return Rank(options.rank, options.control_fd, Writer(options.event_fd, timeout_s=None)).serve()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Daemon threads may hold the engine's locks: leave without waiting for them or for its destructors.
    os._exit(status)
