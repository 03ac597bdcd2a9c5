"""The scale of the video latents."""

import torch

from magi2.vae.constants import LATENT_MEAN, LATENT_STD, denormalize, normalize


def test_there_is_a_pair_for_each_of_the_48_channels() -> None:
    assert len(LATENT_MEAN) == len(LATENT_STD) == 48
    assert min(LATENT_STD) > 0


def test_denormalize_undoes_normalize_up_to_the_last_bit() -> None:
    latent = torch.randn(1, 48, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(denormalize(normalize(latent)), latent, rtol=0.0, atol=1e-6)


def test_raw_mean_becomes_zero_and_one_deviation_becomes_one() -> None:
    raw = torch.tensor(LATENT_MEAN).view(1, 48, 1, 1, 1)
    deviation = torch.tensor(LATENT_STD).view(1, 48, 1, 1, 1)
    assert torch.equal(normalize(raw), torch.zeros_like(raw))
    torch.testing.assert_close(normalize(raw + deviation), torch.ones_like(raw), rtol=0.0, atol=1e-5)
