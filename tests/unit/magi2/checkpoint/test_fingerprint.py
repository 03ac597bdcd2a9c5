"""What a job records of its engine."""

from pathlib import Path

from magi2.checkpoint.fingerprint import checkpoint_digest, engine_digest, fingerprint
from magi2.config import EngineConfig, ModelConfig


def test_fingerprint_names_all_that_decides_the_result(tiny_root: Path) -> None:
    found = fingerprint(EngineConfig(tiny_root, deterministic=True), ModelConfig.tiny())
    assert {"engine", "checkpoint", "device", "dtype", "deterministic", "noise_device", "torch"} <= set(found)
    assert (found["dtype"], found["deterministic"], found["noise_device"]) == ("bfloat16", "1", "cpu")
    assert all(isinstance(value, str) and value for value in found.values())


def test_copied_checkpoint_has_the_same_digest(tiny_root: Path, own_root: Path) -> None:
    assert checkpoint_digest(own_root) == checkpoint_digest(tiny_root)


def test_other_weights_have_another_digest(own_root: Path) -> None:
    before = checkpoint_digest(own_root)
    path = own_root / "preview/model-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert checkpoint_digest(own_root) != before


def test_engine_digest_repeats() -> None:
    assert engine_digest() == engine_digest()
