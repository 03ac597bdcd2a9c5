"""A CUDA device for every test of this tier; a run that asked for the tier and has none fails."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.fail("the gpu tier was asked for, but torch sees no CUDA device")
    return torch.device("cuda")
