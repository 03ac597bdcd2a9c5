"""How the devices are linked, and what the collectives carry at the engine's own message sizes.

The rate of a collective is the bytes that one rank sends to others (all-to-all), gets from them (all-gather)
or both once (all-reduce: 2 (P-1)/P of the message), over the slowest rank's time.
"""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.four_gpus.rank import Place
from benchmarks.four_gpus.record import Row
from benchmarks.four_gpus.stages import RATES
from benchmarks.four_gpus.world import TEXT_LENGTHS, slowest, world_of
from magi2.contract import NUM_AUDIO_LATENTS, NUM_LATENT_FRAMES, TIERS
from magi2.parallel.groups import Group, Groups
from magi2.parallel.layout import Layout, head_counts, split_lengths
from magi2.parallel.memory import block_bytes, layer_bytes

REPEATS = 5


def run_link(place: Place) -> None:
    """Show the topology, and measure every collective in a world of sequence-parallel ranks."""
    if place.rank == 0:
        for line in topology(place):
            place.rows.say(line)
    with world_of(place, Layout(ulysses=place.world)) as groups:
        bench = Bench(place, groups)
        for tier, names in (("272p", (RATES[0], RATES[2])), ("540p", (RATES[1], RATES[3]))):
            bench.heads(names[0], tier)
            bench.experts(names[1], tier)
        bench.gathers()
        bench.sum()


def topology(place: Place) -> list[str]:
    """Return who reaches whom, as the driver says it."""
    if place.device_type == "cpu":
        return ["CPU: no links"]
    count = range(place.world)
    lines = [
        f"GPU {a} reaches {[b for b in count if a != b and torch.cuda.can_device_access_peer(a, b)]} directly"
        for a in count
    ]
    if program := shutil.which("nvidia-smi"):
        asked = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, check=False)
        lines += asked.stdout.splitlines()
    return lines


@dataclass
class Bench:
    """The collectives of one world."""

    place: Place
    groups: Groups

    @property
    def _device(self) -> torch.device:
        return torch.device(self.place.device)

    def _tokens(self, tier: str) -> int:
        size = TIERS[tier]
        video = NUM_LATENT_FRAMES * size.latent_height * size.latent_width
        return 2 * (video + NUM_AUDIO_LATENTS) + sum(TEXT_LENGTHS)

    def heads(self, name: str, tier: str) -> None:
        """Queries, keys and values of the first half of a rank's heads, as one exchange carries them."""
        model, world = self.place.model, self.place.world
        keys = -(-model.num_heads // world // 2)
        self._exchange(name, tier, [3 * keys * model.head_dim] * world)

    def experts(self, name: str, tier: str) -> None:
        """All MoE heads of a rank's tokens to those that own them."""
        model = self.place.model
        counts = head_counts(model.moe.num_heads, self.place.world)
        self._exchange(name, tier, [count * model.moe_head_dim for count in counts])

    def gathers(self) -> None:
        """A streamed layer's shares over replicas, and an HSDP layer's shards over all ranks."""
        model, world = self.place.model, self.place.world
        moe = max(model.moe.layers)
        block = block_bytes(model, Layout(), moe)
        own = layer_bytes(model, moe)
        self._gather(RATES[4], block // world)
        self._gather(RATES[5], (own.total - own.experts) // world)

    def sum(self) -> None:
        """The projection of all tokens, as tensor parallelism sums it."""
        group, world = self.groups.world, self.place.world
        rows, width = self._tokens("540p"), self.place.model.hidden_size
        x = torch.full((rows, width), float(group.position + 1), dtype=torch.bfloat16, device=self._device)
        right = float(world * (world + 1) // 2)
        is_right = bool((group.add_up(x.clone()) == right).all())
        moved = 2 * (world - 1) * x.nbytes // world
        self._add(RATES[6], moved, x.nbytes, lambda: group.add_up(x), is_right=is_right)

    def _exchange(self, name: str, tier: str, widths: list[int]) -> None:
        """Trade own tokens, some values each for every rank, for all tokens of own values."""
        group = self.groups.sp
        lengths = split_lengths(self._tokens(tier), group.size)
        own, mine = lengths[group.position], widths[group.position]
        send_counts, counts = [own * width for width in widths], [length * mine for length in lengths]
        rank = torch.full((sum(send_counts),), float(group.position), dtype=torch.bfloat16)
        send = rank.to(self._device)

        def work() -> torch.Tensor:
            return group.exchange(send, send_counts, (sum(counts),), counts).wait()

        is_right = _is_by_rank(work(), counts)
        moved = 2 * (sum(send_counts) - send_counts[group.position])
        self._add(name, moved, send.nbytes, work, is_right=is_right)

    def _gather(self, name: str, nbytes: int) -> None:
        group: Group = self.groups.world
        value, count = float(group.position), nbytes // 2
        part = torch.full((count,), value, dtype=torch.bfloat16, device=self._device)
        out = torch.empty(count * group.size, dtype=torch.bfloat16, device=self._device)
        group.gather_into(out, part)
        is_right = _is_by_rank(out, [count] * group.size)
        self._add(
            name,
            part.nbytes * (group.size - 1),
            part.nbytes,
            lambda: group.gather_into(out, part),
            is_right=is_right,
        )

    def _add(
        self, name: str, moved: int, message: int, work: Callable[[], object], *, is_right: bool
    ) -> None:
        def repeated() -> None:
            for _ in range(REPEATS):
                work()

        repeated()
        seconds = slowest(self.groups, self._device, repeated) / REPEATS
        facts = {"ms": round(1e3 * seconds, 3), "message_mb": round(message / 1e6, 2), "backend": _backend()}
        is_right = bool(self.groups.world.stack(torch.tensor(int(is_right))).all())
        rate = moved / seconds / 1e9
        self.place.rows.add(Row(name, rate, "GB/s", None, is_right, facts | {"is_right": is_right}))


def _is_by_rank(x: torch.Tensor, counts: list[int]) -> bool:
    """Whether the values are the ranks', one after the other."""
    parts = torch.split(x, counts)
    return all(bool((part == rank).all()) for rank, part in enumerate(parts))


def _backend() -> str:
    return str(dist.get_backend_config())
