"""A rank is killed inside a step, and nobody watches: its peers must end by themselves.

One process starts the ranks, each of which predicts without end; the last one kills itself between two layers
of a step. The others' collectives then fail, or run into their time-out, and the processes end.
"""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.four_gpus import launch, weights
from benchmarks.four_gpus.rank import Place
from benchmarks.four_gpus.record import Row
from magi2.parallel.groups import joined, open_groups
from worker.devices import free_port

TIMEOUT_S = 20.0
# Beyond the time-out a watchdog still has to see it and to end its process.
SLACK_S = 60.0
NUM_WARM = 2
POLL_S = 0.05


def run_loss(place: Place) -> None:
    """Start the ranks, see the last one die, and time the others' ends."""
    with tempfile.TemporaryDirectory(prefix="loss-") as name:
        folder, port = Path(name), free_port()
        common = [
            *("-m", "benchmarks.four_gpus.rank", "--stage", place.stage, "--part", "lost"),
            *("--world", str(place.world), "--device", place.device_type, "--port", str(port)),
            *("--rows", str(folder / "rows"), "--limit", str(place.limit_s)),
            *(["--tiny"] if place.is_tiny else []),
        ]
        commands = [[*common, "--rank", str(rank)] for rank in range(place.world)]
        environ = launch.environment(on_cpu=place.device_type == "cpu")
        started = launch.start(commands, environ, folder)
        try:
            judge(place, started)
        finally:
            started.kill()


def judge(place: Place, started: launch.Started) -> None:
    """Wait for the victim's end, then for the others'."""
    deadline = time.monotonic() + place.limit_s
    while started.codes[-1] is None:
        if time.monotonic() > deadline or any(started.codes[:-1]):
            raise RuntimeError(f"no rank was killed: {started.codes} {started.tails()}")
        time.sleep(POLL_S)
    victim, killed_at = started.codes[-1], time.monotonic()
    place.rows.say(f"the last rank ended with {victim}")
    while None in started.codes and time.monotonic() - killed_at < TIMEOUT_S + SLACK_S:
        time.sleep(POLL_S)
    seconds, codes = time.monotonic() - killed_at, started.codes
    is_over = None not in codes and 0 not in codes and victim == -signal.SIGKILL
    last_words = {log: lines[-1][:200] for log, lines in started.tails().items() if lines}
    facts = {"exit_codes": codes, "last_words": last_words}
    target = f"within the {TIMEOUT_S:.0f} s of a collective and {SLACK_S:.0f} s"
    value = seconds if None not in codes else None
    place.rows.add(Row("from the kill to the last peer's end", value, "s", target, is_over, facts))


def run_lost(place: Place) -> None:
    """Predict without end; the last rank dies in the third step."""
    device = torch.device(place.device)
    torch.set_num_threads(1)
    # Imported here: it is not what the process that only watches needs.
    from benchmarks.four_gpus.world import inputs_of

    with (
        torch.no_grad(),
        joined(place.layout, place.launch, device=device, timeout_s=place.limit_s) as patient,
        open_groups(place.layout, place.rank, timeout_s=TIMEOUT_S) as groups,
    ):
        config = weights.reduced(place.model)
        inputs = inputs_of(place, config, "272p")
        # Kernels are compiled before a rank's delay counts as its loss.
        inputs.predict(weights.resident(config, device, patient))
        model = weights.resident(config, device, groups)
        patient.world.stack(torch.zeros(1))
        for step in range(sys.maxsize):
            if step == NUM_WARM and place.rank == place.world - 1:
                model.block.layers[1].register_forward_pre_hook(_die)
            video, _ = inputs.predict(model)
            float(video.sum())  # the host waits, as it does after every step of a run


def _die(_layer: nn.Module, _arguments: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
