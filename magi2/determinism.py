"""The one process-wide switch: true fp32 always, and on request only operations that repeat bit for bit.

Promises: after `configure` no fp32 matrix product runs in a shorter format and no bf16 product is reduced in
bf16, whatever an image or a launcher set before. Deterministic mode is strict: an operation without a
deterministic form raises instead of warning. It does not seed anything: each request has its own generator.
"""

import os

import torch


def configure(*, deterministic: bool) -> None:
    """Fix the numerics of this process; call it once, before the first CUDA operation."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.benchmark = False
    if deterministic:
        # cuBLAS reads this when its first handle is made; torch offers no other way to set it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # noqa: TID251 - an output, not a setting
    torch.use_deterministic_algorithms(deterministic)
