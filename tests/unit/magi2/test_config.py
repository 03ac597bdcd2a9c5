"""Sizes of the model, what is refused, and the environment's closed list."""

from dataclasses import replace
from pathlib import Path

import pytest

from magi2.config import (
    ENVIRONMENT_NAMES,
    EngineConfig,
    EngineEnvironment,
    ModelConfig,
    SamplingConfig,
    engine_environment,
)


def test_released_sizes_follow_from_its_keys() -> None:
    config = ModelConfig.released()
    assert (config.num_heads, config.num_query_groups) == (24, 24)
    assert config.stream_width == 12288
    assert config.num_mixing == 24
    assert config.dense_intermediate == 8192
    assert (config.routed_width, config.moe_head_dim) == (3072, 256)
    assert config.num_bands == 16
    assert config.out_width == 64
    assert [config.attention_modalities(i) for i in (0, 1, 2, 37, 38, 39)] == [3, 3, 1, 1, 3, 3]


def test_tiny_model_divides_by_four_and_has_both_kinds_of_layers() -> None:
    config = ModelConfig.tiny(text_in_channels=80)
    sizes = (config.num_heads, config.num_query_groups, config.moe.num_heads, config.hidden_size)
    assert all(size % 4 == 0 for size in sizes)
    assert config.text_in_channels == 80
    assert config.moe.layers
    assert set(range(config.num_layers)) - set(config.moe.layers)


@pytest.mark.parametrize("config", [ModelConfig.released(), ModelConfig.tiny()], ids=["released", "tiny"])
def test_architecture_file_survives_a_round_trip(config: ModelConfig) -> None:
    arch = config.to_arch_config()
    assert ModelConfig.from_arch_config(arch, time_channel_dim=config.time_channel_dim) == config


def test_unknown_keys_of_an_architecture_file_are_left_alone() -> None:
    config = ModelConfig.tiny()
    assert ModelConfig.from_arch_config(config.to_arch_config() | {"compile": True}) == config


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (None, "activation_type", "gelu"),
        (None, "layer_activation_types", {"3": "gelu"}),
        ("moe_config", "score_func", "softmax"),
        ("attn_gating", "enable", False),
        ("attn_sinks", "enable", False),
        ("mhc_config", "enable", False),
    ],
)
def test_other_equations_are_refused_by_name(section: str | None, key: str, value: object) -> None:
    arch = ModelConfig.tiny().to_arch_config()
    (arch[section] if section else arch)[key] = value
    with pytest.raises(ValueError, match=key):
        ModelConfig.from_arch_config(arch)


def test_missing_key_is_named() -> None:
    arch = ModelConfig.tiny().to_arch_config()
    del arch["moe_config"]["top_k"]
    with pytest.raises(ValueError, match="top_k"):
        ModelConfig.from_arch_config(arch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 24}, "hidden_size 64 must be a positive multiple of head_dim 24"),
        ({"num_query_groups": 3}, "attention heads 4 must be a positive multiple of num_query_groups 3"),
        ({"params_dtype": "float16"}, "params_dtype"),
        ({"mm_layers": (0, 5)}, "mm_layers"),
        ({"time_channel_dim": 63}, "time_channel_dim"),
        ({"time_channel_dim": 512}, "time_channel_dim"),
        ({"hidden_size": 4, "head_dim": 4, "num_query_groups": 1}, "too small"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(ModelConfig.tiny(), **changes)


@pytest.mark.parametrize("changes", [{"top_k": 9}, {"top_k": 0}, {"num_heads": 5}, {"layers": (7,)}])
def test_mixtures_that_do_not_fit_are_refused(changes: dict[str, object]) -> None:
    config = ModelConfig.tiny()
    with pytest.raises(ValueError, match=r"top_k|num_heads|moe_layers"):
        replace(config, moe=replace(config.moe, **changes))


def test_sampler_has_the_released_numbers() -> None:
    sampling = SamplingConfig()
    assert (sampling.shift, sampling.video_guidance, sampling.audio_guidance) == (7.0, 5.0, 7.0)


def test_engine_refuses_an_unknown_dtype() -> None:
    with pytest.raises(ValueError, match="bfloat16, float32"):
        EngineConfig(Path("checkpoint"), dtype="float16")


def test_environment_is_read_by_name() -> None:
    got = engine_environment(
        {
            "MAGI2_CKPT_ROOT": "/data/magi2",
            "MAGI2_DETERMINISTIC": "on",
            "MAGI2_FLASH_ATTN_VERSION": "2",
            "MAGI2_TESTING": "1",
            "PATH": "/bin",
        }
    )
    assert got == EngineEnvironment(Path("/data/magi2"), True, 2, True)


def test_empty_environment_leaves_everything_open() -> None:
    assert engine_environment({}) == EngineEnvironment(None, None, None, False)


def test_every_listed_name_may_be_set() -> None:
    values = dict.fromkeys(ENVIRONMENT_NAMES, "x") | {
        "MAGI2_DETERMINISTIC": "0",
        "MAGI2_FLASH_ATTN_VERSION": "3",
        "MAGI2_TESTING": "0",
    }
    assert engine_environment(values).deterministic is False


def test_misspelt_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"MAGI2_DETERMINSTIC.*nearest name is MAGI2_DETERMINISTIC"):
        engine_environment({"MAGI2_DETERMINSTIC": "1"})


@pytest.mark.parametrize(("name", "value"), [("MAGI2_DETERMINISTIC", "2"), ("MAGI2_FLASH_ATTN_VERSION", "5")])
def test_values_outside_the_allowed_are_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*got {value}"):
        engine_environment({name: value})
