"""Triton's interpreter with bf16 as a GPU has it, and inputs for cases that run in it.

The interpreter keeps bf16 as plain 16-bit integers. It cuts values off where a GPU rounds to the nearest even
one, and multiplies matrices of bf16 as if they were integers; both are put right here. Nothing else differs.
"""

import os
from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

# Rounding to bf16, which keeps 8 bits, and fp32 sums in another order.
ROUNDED = {"rtol": 1.01 * 2**-8, "atol": 1e-6}

_cast: Callable = interpreter._convert_float
_dot: Callable = interpreter.InterpreterBuilder.create_dot
_patch_tensor: Callable = interpreter._patch_lang_tensor


def _exact_cast(value: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
    if (source, target) == (tl.bfloat16, tl.float32):
        return (value.astype(np.uint32) << 16).reshape(value.shape)
    if (source, target) == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16).reshape(value.shape)
    return _cast(value, source, target, mode)


def _exact_dot(self: object, a: object, b: object, d: object, *rest: object) -> object:
    wide = [
        interpreter.TensorHandle(
            _exact_cast(x.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32
        )
        if x.dtype.scalar == tl.bfloat16
        else x
        for x in (a, b)
    ]
    return _dot(self, *wide, d, *rest)


def _patch_tensor_and_index(tensor: type, scope: object, *rest: object) -> None:
    _patch_tensor(tensor, scope, *rest)
    # Triton 3.6 asks for an integer in a way that numpy has given up since.
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def use() -> None:
    """Make this process interpret kernels, and poison whatever they allocate without writing it."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    interpreter._convert_float = _exact_cast
    interpreter.InterpreterBuilder.create_dot = _exact_dot
    interpreter._patch_lang_tensor = _patch_tensor_and_index
    torch.use_deterministic_algorithms(True)  # fills new memory: NaN, or the largest integer
    torch.manual_seed(0)


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def fp32(*shape: int, scale: float = 1.0) -> Tensor:
    return draw(*shape, scale=scale, dtype=torch.float32)


def poison(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=torch.bfloat16)


def assert_rounded(got: Tensor, want: Tensor) -> None:
    """Every value is what the definition gives, rounded once."""
    torch.testing.assert_close(got.float(), want.float(), **ROUNDED)
