"""Strict loading of the transformer from memory-mapped files.

Promises: a checkpoint is taken whole or refused with every difference in one error, before any weight is
read; tensors are assigned, never copied beside a second set of weights: on the host, in their stored dtype,
they stay in the mapped file. A rank of several is as strict and reads its own part of every tensor only. The
router chooses by the averaged bias. It verifies no other part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from magi2.checkpoint.index import Contents, TensorEntry, scan_folder
from magi2.checkpoint.keys import build_on_meta, compare, needs_of
from magi2.config import ModelConfig
from magi2.errors import CheckpointError
from magi2.model.distribute import Own, distribute
from magi2.model.transformer import Magi2Transformer
from magi2.parallel.groups import Groups
from magi2.parallel.hsdp import as_shard, own_rows

# Gives a rank's own part of a stored tensor: its name, and how the part is taken from the whole.
Source = Callable[[str, Own], Tensor]
_RAW_BIAS = "router.expert_bias"
_AVERAGED_BIAS = "router.expert_bias_ema"


def load_transformer(
    folder: Path,
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    flash_attn_version: int | None = None,
    groups: Groups | None = None,
) -> Magi2Transformer:
    """Build the transformer and fill it from the folder of its shards.

    Args:
        folder: Holds the index and its shards, or one file.
        config: Sizes and dtype; floating tensors stored in another dtype are cast.
        device: Where the weights go.
        flash_attn_version: Handed to the model.
        groups: Of this rank; None means one device.

    Raises:
        CheckpointError: Files are missing or broken, or tensors are missing, not expected or misshapen.
        LayoutError: The layout of the groups does not fit the model.
    """
    model = build_on_meta(config, flash_attn_version=flash_attn_version)
    return fill(model, scan_folder(folder), device=device, groups=groups)


def fill(
    model: Magi2Transformer,
    contents: Contents,
    *,
    device: torch.device | str = "cpu",
    groups: Groups | None = None,
) -> Magi2Transformer:
    """Give a model without memory this rank's weights, in place, and return it for inference.

    Raises:
        CheckpointError: As for `load_transformer`.
    """
    problems = contents.problems + compare(needs_of(model), contents.tensors)
    if problems:
        raise CheckpointError(problems)
    entries = contents.tensors
    with ExitStack() as files:
        names = sorted(entries, key=lambda name: str(entries[name].path))  # file by file
        return fill_from(model, FileSource(entries, files), names, device=device, groups=groups)


def fill_from(
    model: Magi2Transformer,
    source: Source,
    names: Iterable[str],
    *,
    device: torch.device | str = "cpu",
    groups: Groups | None = None,
) -> Magi2Transformer:
    """Give a model without memory this rank's part of what a source holds, in place.

    Args:
        model: On the meta device.
        source: Of all tensors, whole ones of the right shapes.
        names: All tensors, in the order in which they are read.
        device: Where the weights go.
        groups: Of this rank; None means one device.
    """
    dtypes = {name: need.dtype for name, need in needs_of(model).items()}
    groups = groups or Groups()
    own = distribute(model, groups, device_type=torch.device(device).type)
    sharded = {name: like for name, like in model.state_dict().items() if isinstance(like, DTensor)}
    take = {name: _rows_of(own[name], groups) if name in sharded else own[name] for name in own}
    state = {name: source(name, take[name]).to(device=device, dtype=dtypes[name]) for name in names}
    for name, like in sharded.items():
        state[name] = as_shard(state[name], like)
    for name in state:
        state[name] = state[averaged(name)]
    model.load_state_dict(state, strict=True, assign=True)
    refuse_meta(model)
    return model.eval()


class FileSource:
    """A source of the tensors in files, each opened once.

    Args:
        entries: Where every tensor lies.
        files: Closes them.
    """

    def __init__(self, entries: Mapping[str, TensorEntry], files: ExitStack) -> None:
        self._entries, self._files = entries, files
        self._open: dict[Path, Any] = {}

    def __call__(self, name: str, own: Own) -> Tensor:
        """Return a view of the mapped file where that can be: pages outside the own part are not read."""
        path = self._entries[name].path
        if path not in self._open:
            self._open[path] = self._files.enter_context(safe_open(path, framework="pt"))
        return own(self._open[path].get_tensor(name))


def averaged(name: str) -> str:
    """Return the stored tensor behind a model's tensor: for the router's raw bias the averaged one."""
    return name.removesuffix(_RAW_BIAS) + _AVERAGED_BIAS if name.endswith(_RAW_BIAS) else name


def refuse_meta(model: nn.Module) -> None:
    """Refuse a model of which something has no memory: a buffer that no checkpoint holds, for one.

    Raises:
        CheckpointError: It names what is empty.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    empty = [f"{name} has no memory after loading" for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise CheckpointError(empty)


def _rows_of(own: Own, groups: Groups) -> Own:
    """Return how a sharded tensor's rows are taken."""
    return lambda stored: own_rows(own(stored), groups.world)
