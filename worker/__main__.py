"""`python -m worker`: one agent process for one group: the loop, the heartbeat, the doorbells, the signals.

The main thread only waits for signals; the first SIGTERM or SIGINT drains, the second one gives the current
job back at once. It ends with status 0 after a drain, and with 1 when the agent could not start or go on.

When an operator wants another profile, the agent leaves as for a drain, its locks and its row with it, and a
new one serves that profile until the process ends; there is never more than one.
"""

import argparse
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

import structlog

from farm.errors import FarmError
from farm.metrics.exporter import MetricsServer
from farm.profiles import load_profiles
from farm.settings import Settings, environment, load_settings
from farm.telemetry import configure_logging
from farm.tracing import close_tracing, configure_tracing
from worker.agent import Agent, AgentConfig, AgentError
from worker.consumer import DoorbellConsumer
from worker.devices import DeviceError, parse_devices
from worker.engine_api import ENGINES

log = structlog.get_logger(__name__)

ENDED, DRAINING, RESUMED = 0, -1, -2  # no signal has these numbers


def main(argv: Sequence[str] | None = None) -> int:
    """Run an agent until it is drained; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m worker", description="serve one profile on one group")
    parser.add_argument("--profile", help="row of profiles.yaml (default: FARM_WORKER__PROFILE)")
    parser.add_argument("--devices", help="such as 0,1,2,3 (default: FARM_WORKER__DEVICES)")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="magi2", help="others are for tests")
    options = parser.parse_args(argv)
    try:
        settings = load_settings()
        configure_logging(settings, service="worker")
        configure_tracing(settings, service="worker")
        return _serve(settings, _config(settings, options))
    except (FarmError, DeviceError, AgentError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _config(settings: Settings, options: argparse.Namespace) -> AgentConfig:
    profiles = load_profiles(settings.profiles_file)
    name = options.profile or settings.worker.profile
    if name is None:
        known = ", ".join(sorted(profiles.by_name))
        raise DeviceError(f"which profile? Give --profile or FARM_WORKER__PROFILE: one of {known}")
    devices = tuple(settings.worker.devices) if options.devices is None else parse_devices(options.devices)
    return AgentConfig(
        profile=profiles.get(name),
        profiles=profiles,
        devices=devices,
        engine=options.engine,
        environment=environment(),
    )


def _serve(settings: Settings, config: AgentConfig) -> int:
    # A SimpleQueue may be filled by a signal handler that interrupts its reader; a lock or an event may not.
    news: queue.SimpleQueue[int] = queue.SimpleQueue()
    shift = _Shift(settings, news)
    metrics = MetricsServer(settings.metrics, shift.is_ready)
    for wanted in (signal.SIGTERM, signal.SIGINT):
        signal.signal(wanted, lambda received, _: news.put(received))
    try:
        following: AgentConfig | None = config
        while following is not None:
            following = shift.serve(following)
    finally:
        metrics.close()
        close_tracing()
    return 0


class _Shift:
    """The agents of this process, one after the other: the next is made when the one before has left."""

    def __init__(self, settings: Settings, news: "queue.SimpleQueue[int]") -> None:
        self._settings = settings
        self._news = news
        self._agent: Agent | None = None

    def is_ready(self) -> bool:
        """Tell whether an agent is at work whose ranks are loaded."""
        agent = self._agent
        return agent is not None and agent.group.is_ready and not agent.is_leaving

    def serve(self, config: AgentConfig) -> AgentConfig | None:
        """Serve one profile until its agent has left; return what the same devices serve next, if anything.

        Raises:
            AgentError, DeviceError, FarmError: The agent cannot start or go on, or nothing can follow it.
        """
        settings, news = self._settings, self._news
        agent = self._agent = Agent(
            settings, config, on_drain=lambda: news.put(DRAINING), on_resume=lambda: news.put(RESUMED)
        )
        failures: list[AgentError] = []
        loop = threading.Thread(target=_run_loop, args=(agent, failures, news), name="agent-loop")
        consumer = _consumer(settings, config, agent)
        consumer.start()
        loop.start()
        is_stopped = False
        while (number := news.get()) != ENDED:
            if number == DRAINING:
                consumer.stop()
            elif number == RESUMED:
                consumer = _consumer(settings, config, agent)
                consumer.start()
            else:
                is_stopped = True
                log.info("signal", signal=signal.Signals(number).name)
                agent.drain(now=agent.is_leaving)
        loop.join()
        consumer.stop()
        if failures:
            raise failures[0]
        if is_stopped or agent.next_profile is None:
            return None
        log.info("profile_changes", was=config.profile.name, profile=agent.next_profile)
        profiles = load_profiles(settings.profiles_file)
        return replace(config, profile=profiles.get(agent.next_profile), profiles=profiles)


def _consumer(settings: Settings, config: AgentConfig, agent: Agent) -> DoorbellConsumer:
    name = config.profile.name
    return DoorbellConsumer(settings, name, agent.group_id, ring=agent.ring, on_shutdown=agent.drain)


def _run_loop(agent: Agent, failures: list[AgentError], news: "queue.SimpleQueue[int]") -> None:
    try:
        agent.run_forever()
    except AgentError as error:
        failures.append(error)
    finally:
        news.put(ENDED)


if __name__ == "__main__":
    sys.exit(main())
