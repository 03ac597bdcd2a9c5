"""A streamed run with the step cache on: four steps at 272p, which of them came from the cache, and of what.

The threshold is so high and the warm-up so short that random weights hit; how good cached steps look is no
question for random weights.
"""

import torch
from torch import nn

from benchmarks.four_gpus.layouts import NUM_DISTINCT, model_of
from benchmarks.four_gpus.rank import NotHereError, Place
from benchmarks.four_gpus.record import Row
from benchmarks.four_gpus.world import inputs_of, meet, of_all, world_of
from magi2 import determinism
from magi2.config import CacheConfig, SamplingConfig
from magi2.model.denoiser import TransformerDenoiser
from magi2.sampling.cache import cached, missing_package
from magi2.sampling.loop import denoise

TIER = "272p"
NUM_STEPS = 4
EASY = CacheConfig(threshold=0.99, warmup_steps=1, max_consecutive=3)


def run_cache(place: Place) -> None:
    """Denoise with the cache on, and count what ran."""
    if why := missing_package():
        raise NotHereError(why)
    determinism.configure(deterministic=False)
    device = torch.device(place.device)
    with (
        torch.no_grad(),
        world_of(place, place.layout) as groups,
        model_of(place, groups, place.model, NUM_DISTINCT) as model,
    ):
        place.rows.say("all layers are in place")
        inputs = inputs_of(place, place.model, TIER)
        runs = count_runs(model.block.layers)
        if model.streamer is not None:
            model.streamer.is_immediate = True
        begin = meet(groups, device)
        with cached(model.block, EASY, NUM_STEPS) as cache:
            latents = denoise(
                TransformerDenoiser(model, inputs.conditioning),
                inputs.noise.video,
                inputs.noise.audio,
                num_steps=NUM_STEPS,
                sampling=SamplingConfig(),
            )
            report = cache.report(groups.replica)
        seconds = meet(groups, device) - begin
        num_layers = place.model.num_layers
        left_out = NUM_STEPS * num_layers - sum(runs)
        own = {int(count) for count in of_all(groups.world, left_out)}
        is_finite = bool(torch.isfinite(latents.video).all())
        hits = report.cached_steps
        facts = {"steps": list(hits), "seconds": round(seconds, 2), "finite": is_finite}
        target = "at least 1"
        place.rows.add(Row("cached steps of 4", len(hits), "", target, is_finite and bool(hits), facts))
        is_even = own == {len(hits) * (num_layers - 1)}
        facts = {"runs_by_layer": runs, "of": NUM_STEPS * num_layers}
        target = "all but the first, in cached steps"
        place.rows.add(Row("layers that were left out", left_out, "", target, is_even, facts))


def count_runs(layers: nn.ModuleList) -> list[int]:
    """Count how often each layer runs from here on."""
    runs = [0] * len(layers)
    for index, layer in enumerate(layers):

        def count(_layer: nn.Module, _arguments: object, index: int = index) -> None:
            runs[index] += 1

        layer.register_forward_pre_hook(count)
    return runs
