"""The process-wide switch, tried in a process of its own."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, torch
torch.set_float32_matmul_precision("medium")
torch.backends.cudnn.allow_tf32 = True
torch.backends.cudnn.benchmark = True
from magi2.determinism import configure
configure(deterministic={deterministic})
print(
    torch.get_float32_matmul_precision(),
    torch.backends.cudnn.allow_tf32,
    torch.backends.cudnn.benchmark,
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    torch.are_deterministic_algorithms_enabled(),
    torch.is_deterministic_algorithms_warn_only_enabled(),
    os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
)
"""


@pytest.mark.parametrize(
    ("deterministic", "ending"), [(True, "True False :4096:8"), (False, "False False None")]
)
def test_fp32_is_true_fp32_and_determinism_is_strict(*, deterministic: bool, ending: str) -> None:
    script = SCRIPT.format(deterministic=deterministic)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env={})
    assert done.stdout.strip() == f"highest False False False {ending}", done.stderr
