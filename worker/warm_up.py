"""The self-test of a group before it is called ready: one tiny clip, rendered, checked and thrown away."""

from pathlib import Path

from farm.media import inspect_output
from magi2.contract import GenerationRequest
from worker.engine_api import RenderRequest, RenderResult
from worker.group import GpuGroup, Stop

TIER, STEPS = "272p", 1
RUN_NAME = "warm_up.e0"
PROMPT = "A candle burns in a dark room."


class WarmUpFailedError(Exception):
    """The group renders no clip that could be handed out; its ranks are gone."""


def warm_up(group: GpuGroup, folder: Path) -> None:
    """Render the smallest clip there is, in slot 0, and hold it against the contract.

    Raises:
        WarmUpFailedError: There was no clip, or a bad one.
        GroupCrashError, GroupStuckError: As `GpuGroup.run`.
    """
    path = folder / f"{RUN_NAME}.mp4"
    wanted = GenerationRequest(PROMPT, TIER, STEPS, seed=0, deterministic=group.spec.deterministic)
    request = RenderRequest(RUN_NAME, wanted.to_json(), None, str(path))
    outcomes = group.run([request], RUN_NAME, on_progress=lambda _: None, stop=lambda: Stop.GO_ON)
    outcome = outcomes[RUN_NAME]
    if isinstance(outcome, RenderResult):
        problems = inspect_output(path, wanted.width, wanted.height).problems
    else:
        problems = [str(outcome)]
    path.unlink(missing_ok=True)
    if problems:
        group.kill()
        raise WarmUpFailedError("; ".join(problems))
