"""Strict loading of the transformer from memory-mapped files.

Promises: a checkpoint is taken whole or refused with every difference in one error, before any weight is
read; tensors are assigned, never copied beside a second set of weights: on the host, in their stored dtype,
they stay in the mapped file. A rank of several is as strict and reads its own part of every tensor only. The
router chooses by the averaged bias. It verifies no other part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from magi2.checkpoint.index import Contents, TensorEntry, scan_folder
from magi2.checkpoint.keys import Expected, build_on_meta, compare, needs_of
from magi2.config import ModelConfig
from magi2.errors import CheckpointError
from magi2.model.distribute import Own, distribute
from magi2.model.transformer import Magi2Transformer
from magi2.parallel.groups import Groups
from magi2.parallel.hsdp import as_shard, own_rows

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
    expected = needs_of(model)
    problems = contents.problems + compare(expected, contents.tensors)
    if problems:
        raise CheckpointError(problems)
    groups = groups or Groups()
    own = distribute(model, groups, device_type=torch.device(device).type)
    sharded = {name: like for name, like in model.state_dict().items() if isinstance(like, DTensor)}
    take = {name: _rows_of(own[name], groups) if name in sharded else own[name] for name in own}
    state = dict(_read(contents.tensors, expected, take, torch.device(device)))
    for name, like in sharded.items():
        state[name] = as_shard(state[name], like)
    for name in state:
        state[name] = state[averaged(name)]
    model.load_state_dict(state, strict=True, assign=True)
    refuse_meta(model)
    return model.eval()


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


def _read(
    entries: Mapping[str, TensorEntry],
    expected: Mapping[str, Expected],
    take: Mapping[str, Own],
    device: torch.device,
) -> Iterable[tuple[str, Tensor]]:
    """Yield the rank's own part of every tensor in the model's dtype on the device, file by file."""
    by_path = sorted(entries, key=lambda name: str(entries[name].path))
    for path, names in groupby(by_path, key=lambda name: entries[name].path):
        with safe_open(path, framework="pt") as file:
            for name in names:
                # The stored tensor is a view of the mapped file: pages outside the own part are not read.
                mine = take[name](file.get_tensor(name))
                yield name, mine.to(device=device, dtype=expected[name].dtype)


def _rows_of(own: Own, groups: Groups) -> Own:
    """Return how a sharded tensor's rows are taken."""
    return lambda stored: own_rows(own(stored), groups.world)
