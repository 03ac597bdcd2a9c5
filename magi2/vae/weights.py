"""Read checkpoint files of the VAEs safely and fit their tensors to a module strictly.

Promises: a pickle is only ever read by torch's restricted unpickler, never executed, and the name of whatever
that refuses is reported; names, shapes and finiteness are checked completely and all breaches are raised in
one `CheckpointError`; only what is used leaves the memory map. Which tensors a network has, the callers say.
"""

import json
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from magi2.errors import CheckpointError

Shapes = Mapping[str, Sequence[int]]
ModuleT = TypeVar("ModuleT", bound=nn.Module)

# What torch.load and the zip reader below it raise for files that are damaged or no checkpoint at all.
_UNREADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    OSError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    struct.error,
)
_ZIP_MAGIC = b"PK\x03\x04"
# How torch names what its restricted unpickler refused.
_REFUSED = re.compile(r"GLOBAL (\S+)")
# What an ordinary checkpoint refers to; these are not to blame when a file is refused.
_HARMLESS = ("torch.", "collections.OrderedDict")


def read_pickle(path: Path) -> Mapping[str, object]:
    """Read the dictionary of a `.pth` or `.ckpt` file without running anything that is in it.

    The tensors stay in the file's memory map until someone copies them.

    Raises:
        CheckpointError: The file is missing, damaged, not a dictionary, or holds an object that the
            restricted unpickler refuses; the offending global is named.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.name}: the file is missing; expected at {path}")
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # unusual pickle protocols: judged by the outcome
            # Only the zip form can be mapped; older files are read whole, by the same restricted unpickler.
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except _UNREADABLE as error:
        raise CheckpointError(_why_unreadable(path, error, is_zip=is_zip)) from None
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path.name}: holds a {type(loaded).__name__}, not a dictionary of tensors")
    return cast(Mapping[str, object], loaded)


def read_json(path: Path) -> Mapping[str, Any]:
    """Read the object of a checkpoint's JSON file.

    Raises:
        CheckpointError: The file is missing or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.name}: the file is missing; expected at {path}") from None
    except ValueError as error:
        raise CheckpointError(f"{path.name}: is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path.name}: must hold a JSON object")
    return values


def fit(
    tensors: Mapping[str, object], shapes: Shapes, *, left_out: tuple[str, ...], path: Path
) -> dict[str, Tensor]:
    """Pick the tensors of `shapes` and refuse every deviation at once.

    Args:
        tensors: What the file holds, by name.
        shapes: Name to shape of everything that is needed, in the file's naming.
        left_out: The closed list of name prefixes that the file may hold and that are not read.
        path: The file, for the message.

    Raises:
        CheckpointError: A tensor is missing, unexpected, misshapen, no floating-point tensor, or not finite.
    """
    unexpected = [n for n in tensors if n not in shapes and not str(n).startswith(left_out)]
    problems = [f"{path.name}: tensor {name} is not part of this network" for name in unexpected]
    for name, shape in shapes.items():
        problem = _misfit(tensors.get(name), list(shape))
        if problem is not None:
            problems.append(f"{path.name}: tensor {name} {problem}")
    if problems:
        raise CheckpointError(problems)
    return {name: cast(Tensor, tensors[name]) for name in shapes}


def install(
    module: ModuleT, tensors: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device | str
) -> ModuleT:
    """Put copies of `tensors` into a module built on the meta device and freeze it for inference.

    The copy leaves the memory map of the file behind. The names must be the module's own, all of them.
    """
    copies = {
        name: value.to(device=device, dtype=dtype, copy=True).contiguous() for name, value in tensors.items()
    }
    module.load_state_dict(copies, strict=True, assign=True)
    return module.eval().requires_grad_(requires_grad=False)


def device_of(module: nn.Module) -> torch.device:
    """The device on which a module's weights lie now."""
    return next(module.parameters()).device


def _misfit(value: object, shape: list[int]) -> str | None:
    if value is None:
        return "is missing"
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        return f"is a {kind}, not a floating-point tensor"
    if list(value.shape) != shape:
        return f"has the shape {list(value.shape)}, expected {shape}"
    # Reductions instead of a boolean copy of the tensor: they carry any NaN and infinity along.
    if not all(torch.isfinite(extreme) for extreme in value.aminmax()):
        return "holds values that are not finite"
    return None


def _why_unreadable(path: Path, error: BaseException, *, is_zip: bool) -> str:
    # torch's own text recommends switching the protection off; it is not passed on.
    if isinstance(error, pickle.UnpicklingError):
        refused = _REFUSED.search(str(error))
        name = refused.group(1) if refused else next(_foreign_globals(path, is_zip=is_zip), None)
        if name is not None:
            return (
                f"{path.name}: the pickle refers to {name}, which is neither a tensor nor a plain container "
                "and could run code; it was not loaded. Fetch the file again from its publisher"
            )
    kind = type(error).__name__
    return f"{path.name}: cannot be read as a PyTorch checkpoint ({kind}); it is damaged or incomplete"


def _foreign_globals(path: Path, *, is_zip: bool) -> Iterator[str]:
    """Yield what a pickle refers to besides torch, by disassembling it; nothing is run."""
    strings: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(_pickle_bytes(path) if is_zip else path.read_bytes()):
            if opcode.name in {"GLOBAL", "STACK_GLOBAL"}:
                parts = str(argument).split(" ") if opcode.name == "GLOBAL" else strings[-2:]
                name = ".".join(parts)
                if not name.startswith(_HARMLESS):
                    yield name
            elif isinstance(argument, str):
                strings.append(argument)
    except (ValueError, EOFError, OSError, LookupError, zipfile.BadZipFile):
        return


def _pickle_bytes(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
