"""The lists of tensors of the auxiliary networks, against the released layout."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from magi2.checkpoint.auxiliary import Shapes, oobleck_shapes, turbo_shapes, wan22_shapes
from magi2.checkpoint.tiny_vae import OOBLECK_TINY
from tests.released import RELEASED_TURBO

LAYOUT: Mapping[str, Any] = json.loads(
    (Path(__file__).parents[3] / "golden/vae/released_layout.json").read_text("utf-8")
)


def released_oobleck() -> dict[str, Any]:
    config = copy.deepcopy(OOBLECK_TINY)
    config["model"]["pretransform"]["config"]["decoder"]["config"]["channels"] = 128
    return config


@pytest.mark.parametrize(
    ("net", "shapes"),
    [
        ("wan22_vae", wan22_shapes()),
        ("turbo_vae", turbo_shapes(RELEASED_TURBO)),
        ("stable_audio_decoder", oobleck_shapes(released_oobleck())),
    ],
)
def test_released_sizes_give_the_released_layout(net: str, shapes: Shapes) -> None:
    pairs = LAYOUT[net].items() if isinstance(LAYOUT[net], dict) else LAYOUT[net]
    assert shapes == {name: tuple(shape) for name, shape in pairs}


def test_up_block_without_a_change_of_width_has_no_shortcut() -> None:
    config = RELEASED_TURBO | {"decoder_block_out_channels": [64, 64, 256, 512]}
    assert not [name for name in turbo_shapes(config) if name.startswith("decoder.up_blocks.3.conv_in")]
