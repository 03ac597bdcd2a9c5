"""What made a clip: the engine's code, the checkpoint, the libraries and the device, in short strings.

Promises: equal fingerprints mean that the same request gives the same frames and samples. It reads the first
and last bytes of each weight file, not the 274 GB between them.
"""

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import kernels
import magi2
from kernels.dispatch import attention_setting, choose_attention
from magi2.checkpoint.index import REQUIRED_FILES, SHARDED_FOLDERS
from magi2.config import EngineConfig, ModelConfig

_LIBRARIES = ("torch", "transformers", "diffusers", "av", "Pillow")
_EDGE_BYTES = 65536
_SHORT = 16


def fingerprint(config: EngineConfig, model: ModelConfig) -> dict[str, str]:
    """Return what a job records of the engine that runs it."""
    device = torch.device(config.device)
    is_cuda = device.type == "cuda"
    setting = attention_setting(
        device,
        getattr(torch, model.params_dtype),
        model.head_dim,
        model.attn_softcap,
        flash_attn_version=config.flash_attn_version,
    )
    return {
        "engine": engine_digest()[:_SHORT],
        "checkpoint": checkpoint_digest(config.checkpoint)[:_SHORT],
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.machine(),
        "dtype": config.dtype,
        "deterministic": str(int(config.deterministic)),
        "noise_device": config.noise_device or device.type,
        "attention": choose_attention(setting),
        **{name.lower(): _version(name) for name in _LIBRARIES},
    }


def engine_digest() -> str:
    """Digest the source of everything that computes."""
    digest = hashlib.sha256()
    for package in (magi2, kernels):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{package.__name__}/{path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def checkpoint_digest(root: Path) -> str:
    """Digest names, sizes and edges of the files that the engine reads."""
    paths = [root / name for name in REQUIRED_FILES]
    paths += [path for folder in SHARDED_FOLDERS for path in (root / folder).glob("*.*")]
    digest = hashlib.sha256()
    for path in sorted(set(paths)):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(root)} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_EDGE_BYTES))
            file.seek(max(size - _EDGE_BYTES, 0))
            digest.update(file.read())
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
