"""A transformer of arbitrary small sizes with random weights, for tests."""

from dataclasses import replace

import torch
from torch import Tensor

from magi2.config import MHCConfig, ModelConfig, MoEConfig
from magi2.model.embed import default_bands
from magi2.model.transformer import Magi2Transformer
from magi2.packing import Conditioning, Reference


def small_config(**changes: object) -> ModelConfig:
    """Sizes that are all different; layer 1 is in both lists of layers, layer 2 in neither."""
    config = ModelConfig(
        num_layers=4,
        hidden_size=48,
        head_dim=16,
        num_query_groups=3,
        video_in_channels=6,
        audio_in_channels=8,
        text_in_channels=10,
        mm_layers=(0, 1),
        moe=MoEConfig(
            num_heads=3,
            num_experts=5,
            top_k=2,
            layers=(1, 3),
            expert_width=20,
            shared_width=12,
            modality_width=28,
            route_scale=2.5,
            routed_width=24,
        ),
        mhc=MHCConfig(num_streams=3),
        params_dtype="float32",
        time_channel_dim=8,
    )
    return replace(config, **changes)


def random_model(config: ModelConfig, seed: int = 0) -> Magi2Transformer:
    """Return a model whose every weight is drawn, but for the rotary bands."""
    generator = torch.Generator().manual_seed(seed)
    model = Magi2Transformer(config)
    for name, tensor in model.state_dict().items():
        if name.endswith("rope.bands"):
            tensor.copy_(default_bands(config.num_bands))
        else:
            tensor.copy_(0.15 * torch.randn(tensor.shape, generator=generator))
    return model


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def conditioning(*, num_images: int = 0) -> Conditioning:
    """Unequal branches: 5 and 2 text tokens."""
    images = tuple(
        Reference(seeded(1, 6, 1, 2, 3, seed=k), seeded(1, 1, 10, seed=k)) for k in range(num_images)
    )
    return Conditioning((seeded(1, 5, 10), seeded(1, 2, 10, seed=1)), images)


def latents() -> tuple[Tensor, Tensor]:
    return seeded(1, 6, 2, 3, 4), seeded(1, 9, 8)
