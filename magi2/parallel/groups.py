"""Process groups as handles that callers pass in, and the collectives that the engine uses on them.

Promises: every rank creates every group in one fixed order, with a time-out; a group of one rank has no
handle and its collectives return their input, so one device is no case of its own; sizes that a collective
needs are host integers. A collective that fails says which one, in which group, as `PeerLost`. Who is in
which group is `magi2.parallel.layout`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from magi2.config import Launch
from magi2.errors import PeerLost
from magi2.parallel.layout import Layout, rank_groups

# How long a rank waits for its peers in one collective before it takes them for lost.
COLLECTIVE_TIMEOUT_S = 600.0
# One collective under two names: the older one warns from torch 2.13 on.
_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_AXES = ("tp", "sp", "cfg", "dp", "ep", "replica", "weights", "world")


@dataclass(frozen=True, eq=False)
class Pending:
    """A collective that may still run: `wait` before the result is read, and once only."""

    result: Tensor
    name: str = "alone"
    work: dist.Work | None = None
    # The collective reads it until it has ended.
    source: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the result; on CUDA the current CUDA stream waits, not the host.

        Raises:
            PeerLost: A peer is gone or late.
        """
        if self.work is not None:
            with _named("exchange", self.name):
                self.work.wait()
        return self.result


@dataclass(frozen=True, eq=False)
class Group:
    """Some ranks, this one among them.

    Args:
        name: Of the axis, for messages.
        ranks: Global ranks, rising.
        position: Of this rank among them.
        handle: None for a group of one.
    """

    name: str = "alone"
    ranks: tuple[int, ...] = (0,)
    position: int = 0
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    def exchange(
        self, send: Tensor, send_counts: Sequence[int], shape: Sequence[int], counts: Sequence[int]
    ) -> Pending:
        """Start one all-to-all.

        Args:
            send: Flat, for each rank in turn so many values as `send_counts` says.
            send_counts: Values for each rank.
            shape: Of the result.
            counts: Values from each rank; the result holds them one after the other.
        """
        if self.handle is None:
            return Pending(send.view(*shape))
        received = send.new_empty(sum(counts))
        with _named("exchange", self.name):
            work = dist.all_to_all_single(
                received, send, list(counts), list(send_counts), group=self.handle, async_op=True
            )
        return Pending(received.view(*shape), self.name, work, send)

    def add_up(self, x: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place, and return it."""
        if self.handle is not None:
            with _named("sum", self.name):
                dist.all_reduce(x, group=self.handle)
        return x

    def stack(self, x: Tensor) -> Tensor:
        """Return all ranks' tensors of equal shape, [ranks, ...]."""
        if self.handle is None:
            return x[None]
        out = x.new_empty(self.size * x.numel())
        with _named("gather", self.name):
            _gather_flat(out, x.contiguous().view(-1), group=self.handle)
        return out.view(self.size, *x.shape)

    def gather_into(self, out: Tensor, part: Tensor) -> None:
        """Fill a flat tensor with all ranks' flat parts, in their order; `out` is as long as all together."""
        if self.handle is None:
            out.copy_(part)
            return
        with _named("gather", self.name):
            _gather_flat(out, part, group=self.handle)

    def join_rows(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the rows of all ranks in order; each rank has as many as `lengths` says.

        Padded to the longest, since the list form of the collective takes no uneven lengths on gloo.
        """
        if self.handle is None:
            return x
        longest = max(lengths)
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: x.shape[0]] = x
        rows = self.stack(padded)
        return torch.cat([rows[rank, :length] for rank, length in enumerate(lengths)])

    def share(self, tensors: Sequence[Tensor] | None, device: torch.device) -> list[Tensor]:
        """Send tensors from the first rank to all: shapes and dtypes first, then the values."""
        if self.handle is None:
            return list(tensors or ())
        known = (
            None
            if tensors is None
            else [(list(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors]
        )
        plan = json.loads(self._share_text(json.dumps(known)))
        shared = []
        for index, (shape, dtype) in enumerate(plan):
            if tensors is not None and self.position == 0:
                value = tensors[index].to(device).contiguous()
            else:
                value = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            with _named("broadcast", self.name):
                dist.broadcast(value, self.ranks[0], group=self.handle)
            shared.append(value)
        return shared

    def agree(self, *, wanted: bool) -> bool:
        """Return what the first rank wants."""
        if self.handle is None:
            return wanted
        flag = torch.tensor([int(wanted)])
        with _named("agreement", self.name):
            dist.broadcast(flag, self.ranks[0], group=self.handle)
        return bool(flag[0])

    def send(self, x: Tensor, position: int) -> None:
        """Send a tensor to one rank, which must `receive` it."""
        with _named("send", self.name):
            dist.send(x, self.ranks[position], group=self.handle)

    def receive(self, out: Tensor, position: int) -> Pending:
        """Start to receive a tensor of known shape from one rank."""
        with _named("receive", self.name):
            work = dist.irecv(out, self.ranks[position], group=self.handle)
        return Pending(out, self.name, work)

    def _share_text(self, text: str) -> bytes:
        """Send a text from the first rank, over the host's network."""
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        with _named("broadcast", self.name):
            dist.broadcast(size, self.ranks[0], group=self.handle)
            if self.position != 0:
                data = torch.empty(int(size[0]), dtype=torch.uint8)
            dist.broadcast(data, self.ranks[0], group=self.handle)
        return bytes(data.tolist())


ALONE = Group()


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of one rank; without arguments those of one device.

    Args:
        layout: Valid.
        rank: Global.
        tp, sp, cfg, dp: The groups of the four axes.
        ep: Ranks that own different MoE heads.
        replica: Ranks that render one request; its first one is the output rank.
        weights: Ranks that gather streamed blocks from each other.
        world: All ranks.
    """

    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    tp: Group = ALONE
    sp: Group = ALONE
    cfg: Group = ALONE
    dp: Group = ALONE
    ep: Group = ALONE
    replica: Group = ALONE
    weights: Group = ALONE
    world: Group = ALONE

    @property
    def dispatch(self) -> Group:
        """Ranks that exchange tokens for MoE heads; under tensor parallelism heads arrive already cut."""
        return self.ep if self.layout.tp == 1 else ALONE

    @property
    def windows(self) -> Group:
        """Ranks that share the windows of the video decoder."""
        return self.world if self.layout.vae_patch_parallel > 1 else ALONE

    @property
    def is_output(self) -> bool:
        """Whether this rank encodes prompts and makes the clip of its replica."""
        return self.replica.position == 0


@contextmanager
def open_groups(layout: Layout, rank: int, *, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> Iterator[Groups]:
    """Create all groups of a layout inside a started world, and destroy them after the block.

    Raises:
        PeerLost: A peer did not take part in time; what was created is destroyed.
    """
    opened: list[dist.ProcessGroup] = []
    try:
        yield _create(layout, rank, timedelta(seconds=timeout_s), opened)
    finally:
        for handle in reversed(opened):
            dist.destroy_process_group(handle)


@contextmanager
def joined(
    layout: Layout, launch: Launch, *, device: torch.device, timeout_s: float = COLLECTIVE_TIMEOUT_S
) -> Iterator[Groups]:
    """Meet the other ranks, open the groups of a layout, and leave the world after the block.

    Raises:
        PeerLost: Not all ranks came in time.
    """
    if launch.world == 1:
        yield Groups(layout)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    with _named("start", "world"):
        dist.init_process_group(
            backend,
            init_method=f"tcp://{launch.address}:{launch.port}",
            rank=launch.rank,
            world_size=launch.world,
            timeout=timedelta(seconds=timeout_s),
        )
    try:
        with open_groups(layout, launch.rank, timeout_s=timeout_s) as groups:
            yield groups
    finally:
        dist.destroy_process_group()


def _create(layout: Layout, rank: int, timeout: timedelta, opened: list[dist.ProcessGroup]) -> Groups:
    own: dict[str, Group] = {}
    for axis in _AXES:
        for ranks in rank_groups(layout)[axis]:
            if len(ranks) == 1:
                continue
            # Every rank creates every group, its own or not, so that all count the same ones.
            with _named("creation", axis):
                handle = dist.new_group(list(ranks), timeout=timeout)
            if rank in ranks:
                opened.append(handle)
                own[axis] = Group(axis, ranks, ranks.index(rank), handle)
    alone = {axis: Group(axis, (rank,)) for axis in _AXES if axis not in own}
    return Groups(layout, rank, **own, **alone)


@contextmanager
def _named(operation: str, group: str) -> Iterator[None]:
    """Turn a failure of a collective into the engine's own."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ConnectionError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PeerLost(
            f"{operation} in the group {group} failed: a peer rank is gone or late, so this rank must "
            f"end too "
            f"({first_line})"
        ) from error
