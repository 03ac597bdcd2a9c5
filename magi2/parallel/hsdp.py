"""Sharding of what is no expert over all ranks, by FSDP2: one wrap a layer, and the root.

Promises: no dtype changes, since mixing, sinks, gates and norms must stay fp32; experts keep to their rank,
as sequence-parallel ranks hold different ones; every rank reads only its own rows. It gathers and frees, and
computes nothing, so results equal those of the unsharded layout bit for bit.
"""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from magi2.parallel.groups import Group


def shard(model: nn.Module, layers: Iterable[nn.Module], world: Group, *, device_type: str) -> None:
    """Wrap a model without memory; the parameters of its `moe_mlp` modules stay as they are.

    Args:
        model: Its `prepare` and `forward` see whole parameters.
        layers: The blocks that are gathered one at a time.
        world: All ranks.
        device_type: Where the weights will be.
    """
    if world.handle is None:
        return
    mesh = DeviceMesh.from_group(world.handle, device_type)
    kept = {parameter for name, parameter in model.named_parameters() if ".moe_mlp." in name}
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=kept, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, ignored_params=kept, reshard_after_forward=True)
    register_fsdp_forward_method(model, "prepare")


def own_rows(whole: Tensor, world: Group) -> Tensor:
    """Return the rows of a tensor that this rank keeps: equal blocks, the last ones shorter or empty."""
    block = -(-whole.shape[0] // world.size)
    start = min(world.position * block, whole.shape[0])
    return whole.narrow(0, start, min(block, whole.shape[0] - start))


def as_shard(rows: Tensor, like: DTensor) -> DTensor:
    """Declare rows as this rank's part of a sharded parameter."""
    sharded: DTensor = DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return sharded
