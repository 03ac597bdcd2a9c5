"""What a layout needs of every device and of the host, from the model's sizes alone.

Promises: weights are exact, counted tensor by tensor as the checkpoint holds them; activations and the text
encoder are estimates from measured runs. The same figures refuse a layout, fill `python -m magi2 plan` and
are compared with allocated bytes in tests. Torch-free; it measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from magi2.config import NUM_MODALITIES, ModelConfig
from magi2.contract import DEFAULT_TIER, NUM_AUDIO_LATENTS, NUM_LATENT_FRAMES, TIERS
from magi2.errors import LayoutError
from magi2.parallel.layout import AUTO, Layout, head_counts

GIB = 2**30
# The released text encoder on the device, staged whole, and the host's copy of all auxiliaries.
RELEASED_TEXT_BYTES = 50 * GIB
RELEASED_AUXILIARY_BYTES = 53 * GIB
# The same encoder streamed through two slots, with the hidden states of 7,000 tokens.
STREAMED_TEXT_BYTES = 2 * GIB
# Per token and value of its streams: a run of 116,736 tokens of width 12,288 on one device needs 40 GiB.
_ACTIVATION_BYTES = 30
# States of the streams that cached steps keep: two layers' inputs, what the first adds, what the others add.
_CACHED_COPIES = 4
_TEXT_TOKENS = 774
_BYTES = {"bfloat16": 2, "float32": 4}
_FP32 = 4
_NUM_BRANCHES = 2
_NUM_SLOTS = 2
BY_LAYER, BY_HEAD = "layer", "head"


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer, or of several.

    Args:
        matrices: Cut over tensor-parallel ranks.
        sinks: Cut over tensor-parallel ranks, fp32.
        replicated: The same on every rank.
        experts: Gates, biases and matrices of the experts of all MoE heads.
    """

    matrices: int = 0
    sinks: int = 0
    replicated: int = 0
    experts: int = 0

    def __add__(self, other: LayerBytes) -> LayerBytes:
        return LayerBytes(
            self.matrices + other.matrices,
            self.sinks + other.sinks,
            self.replicated + other.replicated,
            self.experts + other.experts,
        )

    @property
    def total(self) -> int:
        """All of them, on one rank."""
        return self.matrices + self.sinks + self.replicated + self.experts


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank needs, in bytes; the largest rank counts.

    Args:
        weights: Of the transformer, that stay on the device.
        buffers: Unsharded layers, slots and shares that blocks are streamed through.
        activations: Of one request.
        staged: The text encoder, on the output rank while it runs; never together with activations.
        pinned: Of the host, for one rank's blocks.
        pinned_node: Of the host, for all ranks and the auxiliaries.
    """

    weights: int
    buffers: int
    activations: int
    staged: int
    pinned: int
    pinned_node: int

    @property
    def device(self) -> int:
        """The most that is on a device at once."""
        return self.weights + self.buffers + max(self.activations, self.staged)

    def table(self) -> list[tuple[str, float]]:
        """Return the rows that a person reads, in GiB."""
        rows = {
            "weights on the device": self.weights,
            "streaming and unsharding buffers": self.buffers,
            "activations": self.activations,
            "text encoder, while it runs": self.staged,
            "device memory of a rank": self.device,
            "pinned host memory of a rank": self.pinned,
            "pinned host memory of a node": self.pinned_node,
        }
        return [(name, value / GIB) for name, value in rows.items()]


def layer_bytes(model: ModelConfig, layer: int) -> LayerBytes:
    """Count the stored bytes of a layer; matrices in the model's dtype, the rest as fp32."""
    modalities, width, value = (
        model.attention_modalities(layer),
        model.hidden_size,
        _BYTES[model.params_dtype],
    )
    heads = model.num_heads
    qkv = (heads + 2 * model.num_query_groups) * model.head_dim
    attention = modalities * width * (qkv + heads + width)
    mixing = 2 * (3 + 2 * model.mhc.num_streams + model.mhc.num_streams**2)
    phi = 2 * model.stream_width * model.num_mixing
    norms = modalities * (model.stream_width + width + 2 * model.head_dim)
    common = LayerBytes(
        matrices=value * attention,
        sinks=_FP32 * model.sink_token_num * heads,
        replicated=_FP32 * (mixing + phi + norms),
    )
    return common + (_moe_bytes(model) if layer in model.moe.layers else _dense_bytes(model, modalities))


def _dense_bytes(model: ModelConfig, modalities: int) -> LayerBytes:
    matrices = modalities * 3 * model.dense_intermediate * model.hidden_size
    return LayerBytes(_BYTES[model.params_dtype] * matrices, 0, _FP32 * modalities * model.hidden_size)


def _moe_bytes(model: ModelConfig) -> LayerBytes:
    moe, width, value = model.moe, model.hidden_size, _BYTES[model.params_dtype]
    matrices = 2 * width * model.routed_width + 3 * width * (
        moe.shared_width + NUM_MODALITIES * moe.modality_width
    )
    return LayerBytes(
        matrices=value * matrices,
        replicated=_FP32 * NUM_MODALITIES * width,
        experts=moe.num_heads * _moe_head_bytes(model),
    )


def _moe_head_bytes(model: ModelConfig) -> int:
    """Bytes of one MoE head of one layer: matrices, gate and both biases of its experts."""
    dim, moe = model.moe_head_dim, model.moe
    return moe.num_experts * (_BYTES[model.params_dtype] * 3 * dim * moe.expert_width + _FP32 * (dim + 2))


def adapter_bytes(model: ModelConfig) -> int:
    """Bytes of what lies outside the layers, rotary bands included; all fp32."""
    channels = model.video_in_channels + model.audio_in_channels
    inner = (channels + model.text_in_channels + NUM_MODALITIES) * model.stream_width
    outer = (channels + 2) * model.stream_width
    return _FP32 * (inner + outer + model.num_bands)


def block_bytes(model: ModelConfig, layout: Layout, layer: int, rank: int = 0) -> int:
    """Bytes of one layer on one rank of the expert group, nothing sharded."""
    own = layer_bytes(model, layer)
    heads = head_counts(model.moe.num_heads, layout.expert_ranks)[rank]
    experts = own.experts // model.moe.num_heads * heads
    return (own.matrices + own.sinks) // layout.tp + own.replicated + experts


def rank_bytes(model: ModelConfig, layout: Layout, rank: int = 0) -> int:
    """Bytes of all weights of one rank of the expert group, nothing sharded or streamed."""
    return adapter_bytes(model) + sum(
        block_bytes(model, layout, layer, rank) for layer in range(model.num_layers)
    )


def plan(
    model: ModelConfig,
    layout: Layout,
    *,
    tier: str = DEFAULT_TIER,
    staged_bytes: int = RELEASED_TEXT_BYTES,
    auxiliary_bytes: int = RELEASED_AUXILIARY_BYTES,
    stream_by: str = BY_LAYER,
) -> MemoryPlan:
    """Plan the memory of the largest rank.

    Args:
        model: Sizes and dtype.
        layout: A valid one.
        tier: Of the largest clip.
        staged_bytes: Of the text encoder on the device.
        auxiliary_bytes: Of all networks beside the transformer, on the host, for each replica.
        stream_by: What comes to the device at once: `layer`, or `head`, the experts of one MoE head.
    """
    blocks = [block_bytes(model, layout, layer) for layer in range(model.num_layers)]
    adapters, everything = adapter_bytes(model), sum(blocks)
    weights, buffers, pinned = adapters + everything, 0, 0
    if layout.hsdp:
        experts = sum(_own_expert_bytes(model, layout, layer) for layer in range(model.num_layers))
        dense = [block - _own_expert_bytes(model, layout, layer) for layer, block in enumerate(blocks)]
        weights = experts + ceil((adapters + sum(dense)) / layout.world)
        buffers = _NUM_SLOTS * max(dense)
    elif layout.is_streamed:
        resident = resident_layers(model.num_layers, as_count(layout.resident_blocks))
        streamed = [block for layer, block in enumerate(blocks) if layer not in resident]
        pinned = sum(streamed)
        weights, largest = adapters + everything - pinned, max(streamed, default=0)
        if stream_by == BY_HEAD and streamed:
            largest = piece_bytes(model, layout)
        buffers = _NUM_SLOTS * largest
        if layout.is_gathered:
            pinned = ceil(pinned / layout.data_parallel)
            buffers += _NUM_SLOTS * ceil(largest / layout.data_parallel)
    return MemoryPlan(
        weights=weights,
        buffers=buffers,
        activations=activation_bytes(model, layout, tier),
        staged=staged_bytes,
        pinned=pinned,
        pinned_node=pinned * layout.world + auxiliary_bytes * layout.data_parallel,
    )


def as_count(resident_blocks: int | str) -> int:
    """Return how many layers stay before anything is known of the device: with `auto`, none."""
    return 0 if resident_blocks == AUTO else int(resident_blocks)


@dataclass(frozen=True)
class Placement:
    """How a streamed layout uses a device.

    Args:
        stream_by: What comes at once: a layer, or the experts of one MoE head.
        num_resident: Layers that stay.
    """

    stream_by: str = BY_LAYER
    num_resident: int = 0


def place(
    model: ModelConfig,
    layout: Layout,
    *,
    tier: str = DEFAULT_TIER,
    device_bytes: int,
    staged_bytes: int = STREAMED_TEXT_BYTES,
) -> Placement:
    """Choose the finest cut only where whole layers do not fit, and with `auto` as many residents as fit.

    Args:
        model: Sizes and dtype.
        layout: A streamed one.
        tier: Of the largest clip.
        device_bytes: What a device has free for all.
        staged_bytes: What the text encoder needs of it at least.
    """

    def fits(stream_by: str, count: int) -> bool:
        own = replace(layout, resident_blocks=count)
        needed = plan(model, own, tier=tier, staged_bytes=staged_bytes, stream_by=stream_by)
        return needed.device <= device_bytes

    given = as_count(layout.resident_blocks)
    stream_by = BY_LAYER if fits(BY_LAYER, given) or not fits(BY_HEAD, given) else BY_HEAD
    if layout.resident_blocks != AUTO:
        return Placement(stream_by, given)
    counts = [count for count in range(model.num_layers + 1) if count != model.num_layers - 1]
    return Placement(stream_by, max((count for count in counts if fits(stream_by, count)), default=0))


def resident_layers(num_layers: int, count: int) -> frozenset[int]:
    """Choose which layers stay on the device, evenly spread: each streamed one has some to hide behind.

    Raises:
        LayoutError: One layer alone would be streamed, which no ring can do.
    """
    count = min(count, num_layers)
    if num_layers - count == 1:
        raise LayoutError(
            f"--resident-blocks {count} of {num_layers} leaves one block to stream: "
            f"give {count - 1} or {num_layers}"
        )
    return frozenset((2 * index + 1) * num_layers // (2 * count) for index in range(count))


def piece_bytes(model: ModelConfig, layout: Layout) -> int:
    """Bytes of a slot for layers streamed by MoE head: a head's experts, or half a layer, by dtype."""
    matrices, others = [], []
    for layer in range(model.num_layers):
        own = layer_bytes(model, layer)
        rest = own.sinks // layout.tp + own.replicated
        if layer in model.moe.layers:
            after = _BYTES[model.params_dtype] * model.routed_width * model.hidden_size
            fp32 = _FP32 * model.moe.num_experts * (model.moe_head_dim + 2)
            matrices += [(own.matrices - after) // layout.tp, _moe_head_bytes(model) - fp32]
            others += [rest, fp32]
        else:
            late = _dense_bytes(model, model.attention_modalities(layer))
            matrices += [(own.matrices - late.matrices) // layout.tp, late.matrices // layout.tp]
            others += [rest - late.replicated, late.replicated]
    if model.params_dtype == "float32":
        return max(map(sum, zip(matrices, others, strict=True)))
    return max(matrices) + max(others)


def released_plan(layout: Layout, *, tier: str = DEFAULT_TIER, device_bytes: int | None = None) -> MemoryPlan:
    """Plan the released model, on devices of a size as the engine would use them.

    Args:
        layout: A valid one.
        tier: Of the largest clip.
        device_bytes: What a device has; None leaves the text encoder whole and streams by layer.
    """
    model = ModelConfig.released()
    if device_bytes is None:
        return plan(model, layout, tier=tier)
    stream_by = BY_LAYER
    if layout.is_streamed:
        chosen = place(model, layout, tier=tier, device_bytes=device_bytes)
        stream_by, layout = chosen.stream_by, replace(layout, resident_blocks=chosen.num_resident)
    return plan(model, layout, tier=tier, staged_bytes=STREAMED_TEXT_BYTES, stream_by=stream_by)


def activation_bytes(model: ModelConfig, layout: Layout, tier: str) -> int:
    """Estimate what the tokens of one request take on one rank, at a tier."""
    size = TIERS[tier]
    branch = NUM_LATENT_FRAMES * size.latent_width * size.latent_height + NUM_AUDIO_LATENTS + _TEXT_TOKENS
    tokens = ceil(_NUM_BRANCHES * branch / (layout.ulysses * layout.cfg_parallel))
    copies = _CACHED_COPIES * _BYTES[model.params_dtype] if layout.cache_dit else 0
    return tokens * model.stream_width * (_ACTIVATION_BYTES + copies)


def check_memory(needed: MemoryPlan, layout: Layout, *, device_bytes: int, host_bytes: int) -> None:
    """Refuse a layout that needs more than the machine has.

    Raises:
        LayoutError: With the whole table, and the flags that need less.
    """
    problems = []
    if needed.device > device_bytes:
        problems.append(
            f"{needed.device / GIB:.1f} GiB of device memory needed, {device_bytes / GIB:.1f} GiB there"
        )
    if needed.pinned_node > host_bytes:
        problems.append(
            f"{needed.pinned_node / GIB:.1f} GiB of host memory needed, {host_bytes / GIB:.1f} GiB there"
        )
    if problems:
        rows = "; ".join(f"{name} {value:.2f} GiB" for name, value in needed.table())
        raise LayoutError(
            f"layout {layout} does not fit: {', '.join(problems)} ({rows}); raise --ulysses, --tp or "
            f"--ep, add --hsdp, "
            "or choose a layout that streams its blocks"
        )


def _own_expert_bytes(model: ModelConfig, layout: Layout, layer: int) -> int:
    heads = head_counts(model.moe.num_heads, layout.expert_ranks)[0]
    return layer_bytes(model, layer).experts // model.moe.num_heads * heads
