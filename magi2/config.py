"""What the engine is told: the model's sizes, the sampler's numbers, and how one process runs.

Promises: frozen values, checked when built; `ModelConfig.released()` is the published Preview model, and
nothing else in the engine spells out its numbers. No other module of the engine reads the environment,
and this one only the closed list `ENVIRONMENT_NAMES`. Torch-free; it opens no file.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

DTYPES = ("bfloat16", "float32")
NUM_MODALITIES = 3
# Dense MLP widths are rounded down to whole tiles of this many columns.
_WIDTH_MULTIPLE = 128


@dataclass(frozen=True)
class MHCConfig:
    """Manifold-constrained hyper-connections: the residual path of several streams."""

    num_streams: int = 4
    alpha_init: float = 0.01


@dataclass(frozen=True)
class MoEConfig:
    """The multi-head mixture of experts; `routed_width` None means the model's width."""

    num_heads: int
    num_experts: int
    top_k: int
    layers: tuple[int, ...]
    expert_width: int
    shared_width: int
    modality_width: int
    route_norm: bool = True
    route_scale: float = 1.0
    routed_width: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the diffusion transformer, named as the checkpoint's architecture file names them.

    Raises:
        ValueError: Two sizes do not fit together; the message names both.
    """

    num_layers: int
    hidden_size: int
    head_dim: int
    num_query_groups: int
    video_in_channels: int
    audio_in_channels: int
    text_in_channels: int
    mm_layers: tuple[int, ...]
    moe: MoEConfig
    mhc: MHCConfig = field(default_factory=MHCConfig)
    params_dtype: str = "bfloat16"
    intermediate_factor: float = 4
    attn_softcap: float = -1.0
    sink_token_num: int = 1
    time_channel_dim: int = 64

    def __post_init__(self) -> None:
        _divides("hidden_size", self.hidden_size, "head_dim", self.head_dim)
        _divides("attention heads", self.num_heads, "num_query_groups", self.num_query_groups)
        _divides("routed width", self.routed_width, "moe_config.num_heads", self.moe.num_heads)
        if self.params_dtype not in DTYPES:
            raise ValueError(f"params_dtype must be one of {', '.join(DTYPES)} (got {self.params_dtype})")
        if not 0 < self.moe.top_k <= self.moe.num_experts:
            raise ValueError(
                f"top_k {self.moe.top_k} must lie between 1 and num_experts {self.moe.num_experts}"
            )
        has_dense_mlp = set(range(self.num_layers)) - set(self.moe.layers)
        if self.num_bands < 1 or (has_dense_mlp and self.dense_intermediate < 1):
            raise ValueError(f"hidden_size {self.hidden_size} or head_dim {self.head_dim} is too small")
        if self.time_channel_dim % 2 or self.time_channel_dim > self.stream_width:
            raise ValueError(
                f"time_channel_dim {self.time_channel_dim} must be even, at most {self.stream_width}"
            )
        for name, layers in (("mm_layers", self.mm_layers), ("moe_layers", self.moe.layers)):
            if any(not 0 <= layer < self.num_layers for layer in layers):
                raise ValueError(f"{name} {list(layers)} must name layers from 0 to {self.num_layers - 1}")

    @property
    def num_heads(self) -> int:
        """Attention heads of the queries."""
        return self.hidden_size // self.head_dim

    @property
    def stream_width(self) -> int:
        """Width of all residual streams of one token together."""
        return self.mhc.num_streams * self.hidden_size

    @property
    def num_mixing(self) -> int:
        """Coefficients that one token's streams need per half layer: pre, post and residual."""
        return self.mhc.num_streams * (2 + self.mhc.num_streams)

    @property
    def dense_intermediate(self) -> int:
        """Width between the two matrices of a dense MLP."""
        return int(self.hidden_size * self.intermediate_factor * 2 / 3) // _WIDTH_MULTIPLE * _WIDTH_MULTIPLE

    @property
    def routed_width(self) -> int:
        """Width of the routed path of an MoE layer, all MoE heads together."""
        return self.hidden_size if self.moe.routed_width is None else self.moe.routed_width

    @property
    def moe_head_dim(self) -> int:
        """Width of one MoE head."""
        return self.routed_width // self.moe.num_heads

    @property
    def num_bands(self) -> int:
        """Rotary frequencies per axis; three axes rotate `6 * num_bands` of the head's channels."""
        return self.head_dim // 8

    @property
    def out_width(self) -> int:
        """Columns of the output: the widest of the two generated modalities."""
        return max(self.video_in_channels, self.audio_in_channels)

    def attention_modalities(self, layer: int) -> int:
        """Weight sets of a layer's attention, stream norm and dense MLP."""
        return NUM_MODALITIES if layer in self.mm_layers else 1

    def with_dtype(self, params_dtype: str) -> ModelConfig:
        """Return the same model with its large matrices and activations in another dtype."""
        return replace(self, params_dtype=params_dtype)

    @classmethod
    def released(cls) -> ModelConfig:
        """Return the published Preview model."""
        return cls(
            num_layers=40,
            hidden_size=3072,
            head_dim=128,
            num_query_groups=24,
            video_in_channels=48,
            audio_in_channels=64,
            text_in_channels=5120,
            mm_layers=(0, 1, 38, 39),
            moe=MoEConfig(
                num_heads=12,
                num_experts=256,
                top_k=6,
                layers=tuple(range(2, 38)),
                expert_width=1280,
                shared_width=1280,
                modality_width=1280,
                route_scale=4.9,
            ),
        )

    @classmethod
    def tiny(cls, *, text_in_channels: int = 64) -> ModelConfig:
        """Return a model that runs on two CPU cores; every axis divides by four."""
        return cls(
            num_layers=5,
            hidden_size=64,
            head_dim=16,
            num_query_groups=4,
            video_in_channels=48,
            audio_in_channels=64,
            text_in_channels=text_in_channels,
            mm_layers=(0, 4),
            moe=MoEConfig(
                num_heads=4,
                num_experts=8,
                top_k=2,
                layers=(1, 2, 3),
                expert_width=32,
                shared_width=32,
                modality_width=32,
                route_scale=4.9,
            ),
        )

    @classmethod
    def from_arch_config(cls, arch: Mapping[str, Any], *, time_channel_dim: int = 64) -> ModelConfig:
        """Read the `arch_config` section of a checkpoint; keys that mean nothing to the model are ignored.

        Raises:
            ValueError: A key is missing, or asks for a model that these equations do not describe.
        """
        try:
            _refuse_unsupported(arch)
            moe = arch["moe_config"]
            return cls(
                num_layers=arch["num_layers"],
                hidden_size=arch["hidden_size"],
                head_dim=arch["head_dim"],
                num_query_groups=arch["num_query_groups"],
                video_in_channels=arch["video_in_channels"],
                audio_in_channels=arch["audio_in_channels"],
                text_in_channels=arch["text_in_channels"],
                mm_layers=tuple(arch["mm_layers"]),
                moe=MoEConfig(
                    num_heads=moe["num_heads"],
                    num_experts=moe["num_experts"],
                    top_k=moe["top_k"],
                    layers=tuple(moe["moe_layers"]),
                    expert_width=moe["expert_intermediate_size"],
                    shared_width=moe["shared_expert_intermediate_size"],
                    modality_width=moe["modality_specific_expert_intermediate_size"],
                    route_norm=moe["route_norm"],
                    route_scale=moe["route_scale"],
                    routed_width=moe.get("split_merge_intermediate_size"),
                ),
                mhc=MHCConfig(arch["mhc_config"]["num_stream"], arch["mhc_config"]["alpha_init"]),
                params_dtype=arch["params_dtype"],
                intermediate_factor=arch["intermediate_factor"],
                attn_softcap=arch["attn_softcap"],
                sink_token_num=arch["attn_sinks"]["sink_token_num"],
                time_channel_dim=time_channel_dim,
            )
        except KeyError as error:
            raise ValueError(f"arch_config lacks the key {error}") from error

    def to_arch_config(self) -> dict[str, Any]:
        """Return the `arch_config` section that `from_arch_config` reads back."""
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "head_dim": self.head_dim,
            "num_query_groups": self.num_query_groups,
            "video_in_channels": self.video_in_channels,
            "audio_in_channels": self.audio_in_channels,
            "text_in_channels": self.text_in_channels,
            "params_dtype": self.params_dtype,
            "intermediate_factor": self.intermediate_factor,
            "mm_layers": list(self.mm_layers),
            "activation_type": "swiglu7",
            "attn_softcap": self.attn_softcap,
            "attn_gating": {"enable": True},
            "attn_sinks": {"enable": True, "sink_token_num": self.sink_token_num},
            "mhc_config": {
                "enable": True,
                "num_stream": self.mhc.num_streams,
                "alpha_init": self.mhc.alpha_init,
            },
            "moe_config": {
                "num_heads": self.moe.num_heads,
                "num_experts": self.moe.num_experts,
                "top_k": self.moe.top_k,
                "score_func": "sigmoid",
                "route_norm": self.moe.route_norm,
                "route_scale": self.moe.route_scale,
                "moe_layers": list(self.moe.layers),
                "expert_intermediate_size": self.moe.expert_width,
                "shared_expert_intermediate_size": self.moe.shared_width,
                "modality_specific_expert_intermediate_size": self.moe.modality_width,
                "split_merge_intermediate_size": self.moe.routed_width,
            },
        }


@dataclass(frozen=True)
class SamplingConfig:
    """Numbers of the released sampler; a request cannot change them."""

    shift: float = 7.0
    video_guidance: float = 5.0
    audio_guidance: float = 7.0


@dataclass(frozen=True)
class CacheConfig:
    """When a step may take its layers from the cache; a request decides whether at all.

    Args:
        threshold: Largest relative change of the first layer's output, between 0 and 1.
        warmup_steps: Steps at the begin that are always computed.
        max_consecutive: Most cached steps in a row.
    """

    threshold: float = 0.24
    warmup_steps: int = 4
    max_consecutive: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ValueError(f"the cache's threshold must lie between 0 and 1 (got {self.threshold})")
        if self.warmup_steps < 1 or self.max_consecutive < 1:
            raise ValueError(
                f"the cache's warm-up and cap must be at least one step (got {self.warmup_steps} and "
                f"{self.max_consecutive})"
            )

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> CacheConfig:
        """Read the members of a profile's row, such as `cache_threshold`; what it leaves out is usual.

        Raises:
            ValueError: A number is out of range.
        """
        return cls(**{name: row[f"cache_{name}"] for name in CACHE_NUMBERS if f"cache_{name}" in row})


CACHE_NUMBERS = tuple(each.name for each in fields(CacheConfig))


@dataclass(frozen=True)
class EngineConfig:
    """How one process runs the engine.

    Args:
        checkpoint: The released folder layout.
        device: As torch spells it.
        dtype: Of the transformer's large matrices: bfloat16 as released, float32 for strict comparison.
        deterministic: Fixed for the life of the process.
        crf: Quality of the H.264 stream.
        noise_device: Whose generator draws the noise; None means that of `device`.
        cache: When requests with the acceleration `cache_dit` may skip layers.
        flash_attn_version: Insist on a flash attention version; None leaves the choice to the dispatcher.
    """

    checkpoint: Path
    device: str = "cpu"
    dtype: str = "bfloat16"
    deterministic: bool = False
    crf: int = 10
    noise_device: str | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    flash_attn_version: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)} (got {self.dtype})")


@dataclass(frozen=True)
class Launch:
    """One process among those that were started together, and where they meet.

    Args:
        rank: Of this process.
        world: How many there are.
        local_rank: Of this process among those of its host: its device.
        address, port: Where rank 0 listens.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Read what `torchrun`, or a worker's group, tells its processes; without it one process is all.

    Raises:
        ValueError: A number is none, or the names come without each other.
    """
    env = os.environ if environ is None else environ
    if "WORLD_SIZE" not in env:
        return Launch()
    try:
        return Launch(
            rank=int(env["RANK"]),
            world=int(env["WORLD_SIZE"]),
            local_rank=int(env["LOCAL_RANK"]),
            address=env["MASTER_ADDR"],
            port=int(env["MASTER_PORT"]),
        )
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"WORLD_SIZE is set, so RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT must be too "
            f"({error}): start with "
            "torchrun, or unset WORLD_SIZE"
        ) from error


# The launcher's names stand here too, so that a typing error in any MAGI2_ name is found.
ENVIRONMENT_NAMES = frozenset(
    {
        "MAGI2_CKPT_ROOT",
        "MAGI2_DETERMINISTIC",
        "MAGI2_FLASH_ATTN_VERSION",
        "MAGI2_TESTING",
        "MAGI2_PIP_ARGS",
        "MAGI2_VALKEY_BIN",
        "MAGI2_POSTGRES_BIN",
        "MAGI2_WEED_BIN",
    }
)
_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True)
class EngineEnvironment:
    """What the environment says; None where a name is not set."""

    ckpt_root: Path | None = None
    deterministic: bool | None = None
    flash_attn_version: int | None = None
    testing: bool = False


def engine_environment(environ: Mapping[str, str] | None = None) -> EngineEnvironment:
    """Read the engine's names from the environment, or from a mapping given instead.

    Raises:
        ValueError: A `MAGI2_` name is not on the closed list, or a value is not among those allowed.
    """
    env = os.environ if environ is None else environ
    for name in env:
        if name.startswith("MAGI2_") and name not in ENVIRONMENT_NAMES:
            near = difflib.get_close_matches(name, ENVIRONMENT_NAMES, n=1) or sorted(ENVIRONMENT_NAMES)
            raise ValueError(f"{name} is not a setting of the engine; the nearest name is {near[0]}")
    root = env.get("MAGI2_CKPT_ROOT")
    version = env.get("MAGI2_FLASH_ATTN_VERSION")
    if version not in (None, "", "2", "3", "4"):
        raise ValueError(f"MAGI2_FLASH_ATTN_VERSION must be 2, 3 or 4 (got {version})")
    return EngineEnvironment(
        ckpt_root=Path(root).expanduser() if root else None,
        deterministic=_boolean(env, "MAGI2_DETERMINISTIC"),
        flash_attn_version=int(version) if version else None,
        testing=bool(_boolean(env, "MAGI2_TESTING")),
    )


def wait_passively() -> None:
    """Let idle threads of CPU kernels sleep instead of spin; call it before torch is imported.

    On a machine with other work, threads that spin for a partner which is not scheduled take the very time
    that it needs: measured on two busy cores, a small render took 13.4 s of CPU time spinning and 1.4 s
    sleeping. A value that the environment already has stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _boolean(env: Mapping[str, str], name: str) -> bool | None:
    text = env.get(name, "")
    if not text:
        return None
    if text.lower() not in _BOOLEANS:
        raise ValueError(f"{name} must be 1 or 0 (got {text})")
    return _BOOLEANS[text.lower()]


def _divides(whole_name: str, whole: int, part_name: str, part: int) -> None:
    if part < 1 or whole < 1 or whole % part:
        raise ValueError(f"{whole_name} {whole} must be a positive multiple of {part_name} {part}")


def _refuse_unsupported(arch: Mapping[str, Any]) -> None:
    """Raise for settings that would need other equations than the released ones."""
    wanted = {
        "activation_type": (arch["activation_type"], "swiglu7"),
        "moe_config.score_func": (arch["moe_config"]["score_func"], "sigmoid"),
        "attn_gating.enable": (arch["attn_gating"]["enable"], True),
        "attn_sinks.enable": (arch["attn_sinks"]["enable"], True),
        "mhc_config.enable": (arch["mhc_config"]["enable"], True),
    }
    for layer, name in (arch.get("layer_activation_types") or {}).items():
        wanted[f"layer_activation_types.{layer}"] = (name, "swiglu7")
    for key, (given, supported) in wanted.items():
        if given != supported:
            raise ValueError(f"{key} must be {supported} (got {given})")
