"""Published configurations of the released networks, for tests that build them at full size."""

from typing import Any

# `turbo_vae/TurboV3-Wan22-TinyShallow_7_7.json`, its training-only fields left out.
RELEASED_TURBO: dict[str, Any] = {
    "latent_channels": 48,
    "out_channels": 3,
    "decoder_block_out_channels": [64, 128, 256, 512],
    "decoder_layers_per_block": [2, 2, 2, 3, 3],
    "decoder_spatio_temporal_scaling": [False, True, True, True],
    "decoder_spatio_only": [False, True, False, False],
    "decoder_is_dw_conv": [False] * 5,
    "decoder_causal": False,
    "patch_size": 2,
    "patch_size_t": 1,
    "use_unpatchify": True,
    "resnet_norm_eps": 1e-6,
    "spatial_compression_ratio": 16,
    "temporal_compression_ratio": 4,
    "first_chunk_size": 7,
    "step_size": 7,
}
