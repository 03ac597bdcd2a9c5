"""A layout applied to the plain model: its own part of every tensor, and the groups that its modules use.

Promises: the model has no memory yet, so this costs none and fails before any weight is read; what a rank
will hold is known by shape and dtype; one device changes nothing. It reads no weight and creates no group.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from magi2.model.attention import Attention
from magi2.model.mlp import DenseMLP
from magi2.model.moe import MoE
from magi2.model.transformer import Magi2Transformer
from magi2.parallel import hsdp
from magi2.parallel.groups import Groups
from magi2.parallel.layout import check
from magi2.parallel.tensor import Cut, cut_of

Own = Callable[[Tensor], Tensor]


def distribute(model: Magi2Transformer, groups: Groups, *, device_type: str = "cpu") -> dict[str, Own]:
    """Turn a model without memory into this rank's part of it, in place.

    Args:
        model: On the meta device.
        groups: Of this rank.
        device_type: Where the weights will be.

    Returns:
        For every name of the state, how this rank's tensor is taken from the stored one.

    Raises:
        LayoutError: The layout does not fit the model.
    """
    check(groups.layout, model.config)
    cuts = {
        name: cut_of(name, tuple(tensor.shape), model.config, groups)
        for name, tensor in model.state_dict().items()
    }
    for name, cut in cuts.items():
        if cut is not None:
            _replace(model, name, cut)
    _hand_out(model, groups)
    if groups.layout.hsdp:
        hsdp.shard(model, model.block.layers, groups.world, device_type=device_type)
    return {name: _whole if cut is None else cut.of for name, cut in cuts.items()}


def _replace(model: nn.Module, name: str, cut: Cut) -> None:
    """Put the rank's own shape in place of a tensor without memory."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    own = cut.of(getattr(module, last))
    is_parameter = isinstance(getattr(module, last), nn.Parameter)
    setattr(module, last, nn.Parameter(own, requires_grad=False) if is_parameter else own)


def _hand_out(model: Magi2Transformer, groups: Groups) -> None:
    model.groups = groups
    for module in model.modules():
        if isinstance(module, Attention | DenseMLP | MoE):
            module.groups = groups
        if isinstance(module, Attention):
            queries, keys, values = (count // groups.tp.size for count in module.head_counts)
            module.head_counts = (queries, keys, values)
        if isinstance(module, MoE):
            module.num_heads //= groups.tp.size


def _whole(tensor: Tensor) -> Tensor:
    return tensor
