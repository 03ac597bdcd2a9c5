"""The video decoder at released size over all ranks: a 540p clip, equal to one rank's, and sooner."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.four_gpus.rank import Place
from benchmarks.four_gpus.record import Row
from benchmarks.four_gpus.world import inputs_of, of_all, world_of
from magi2 import determinism
from magi2.checkpoint.tiny_vae import TURBO_TINY
from magi2.parallel.groups import ALONE, Group
from magi2.vae.turbo import TurboDecoder
from magi2.vae.turbo_network import TurboConfig, TurboNetwork
from tests.released import RELEASED_TURBO


def run_vae(place: Place) -> None:
    """Decode one latent on all ranks, and on the first alone."""
    determinism.configure(deterministic=False)
    device = torch.device(place.device)
    with torch.no_grad(), world_of(place, place.layout) as groups:
        decoder = draw_decoder(place, device)
        latent = inputs_of(place, place.model, "540p").noise.video

        def decode(group: Group) -> Tensor:
            chunks = list(decoder.decode(latent, group))
            return torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.uint8)

        spread, spread_s = timed(groups.world, device, lambda: decode(groups.windows))
        one, one_s = timed(groups.world, device, lambda: decode(ALONE) if place.rank == 0 else spread)
        differing = int((spread != one).sum()) if place.rank == 0 else 0
        frames = {"frames": list(spread.shape), "values": len(torch.unique(spread))}
        is_right = not differing and len(torch.unique(spread)) > 1
        rows = place.rows
        rows.add(Row("values that differ from one rank's", differing, "", "0", is_right, frames))
        rows.add(Row("540p clip on four ranks", spread_s, "s"))
        rows.add(Row("540p clip on one rank", one_s, "s", facts={"speedup": round(one_s / spread_s, 2)}))


def timed(world: Group, device: torch.device, work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Do work twice, and return its result and the slowest rank's seconds for the second time."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    of_all(world, 0.0)
    begin = time.monotonic()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, max(of_all(world, time.monotonic() - begin))


def draw_decoder(place: Place, device: torch.device) -> TurboDecoder:
    """Build the decoder with random weights, the same on all ranks."""
    values = TURBO_TINY if place.is_tiny else RELEASED_TURBO
    config = TurboConfig.from_json(values, source="the released configuration")
    with torch.device("meta"):
        network = TurboNetwork(config)
    network.to_empty(device=device).to(torch.bfloat16)
    generator = torch.Generator(device).manual_seed(11)
    for tensor in network.parameters():
        tensor.normal_(generator=generator)
        tensor.mul_(max(1, tensor[0].numel()) ** -0.5)
    return TurboDecoder(network.eval(), config)
