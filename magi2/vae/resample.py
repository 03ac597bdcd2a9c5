"""Fourier resampling of whole waveforms to a lower rate.

The whole clip is one period: the method is circular and has no window, so it rings a little at both ends.
That belongs to the definition; a polyphase or sinc resampler gives other samples.
"""

import torch
from torch import Tensor

# 25 latents a second of 2048 samples each are a 51.2 kHz signal; a clip has 44.1 kHz.
RATE_UP = 441
RATE_DOWN = 512


def fourier_resample(waveform_W: Tensor, up: int = RATE_UP, down: int = RATE_DOWN) -> Tensor:
    """Resample along the last dim to `int(W * up / down)` samples.

    Args:
        waveform_W: fp32, [..., W].
        up, down: The ratio of the rates, below 1.

    Returns:
        fp32 [..., int(W * up / down)].

    Raises:
        ValueError: The ratio is not below 1, or nothing would be left.
    Source: the reference, scipy.signal.resample along time. Differs: torch.fft, within 2e-6.
    """
    num_in = waveform_W.shape[-1]
    num_out = num_in * up // down
    if not 0 < up < down or num_out < 1:
        raise ValueError(
            f"cannot resample {num_in} samples by {up}/{down}: the rate must fall, a sample must remain"
        )
    spectrum = torch.fft.rfft(waveform_W, dim=-1)[..., : num_out // 2 + 1]
    if num_out % 2 == 0:
        # Its mirror image folds onto the last bin.
        spectrum = torch.cat((spectrum[..., :-1], 2 * spectrum[..., -1:]), dim=-1)
    resampled: Tensor = torch.fft.irfft(spectrum, n=num_out, dim=-1)
    return resampled * (num_out / num_in)
