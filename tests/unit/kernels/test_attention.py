"""Packed attention on the CPU: the chunked definition and torch's kernel with the sink correction."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels import attention, dispatch
from kernels.attention import chunked_attention, sdpa_cpu_attention, sink_correction
from kernels.dispatch import FLASH_PACKAGES, AttentionSetting, choose_attention
from tests import tolerances


def inputs(
    length: int, heads: int, key_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length * 100 + heads)
    shapes = [(length, heads, head_dim), (length, key_heads, head_dim), (length, key_heads, head_dim)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def brute_force(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bounds: list[int], softcap: float) -> Tensor:
    """Explicit extra logits of zero value, in float64, over all keys at once."""
    q, k, v = (x.double() for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    out = torch.zeros_like(q)
    for start, stop in pairwise(bounds):
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], k[start:stop]) * q.shape[2] ** -0.5
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        extra = sinks.double().T[:, None, :].expand(-1, stop - start, -1)
        weights = torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., : stop - start]
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, v[start:stop])
    return out


BOUNDS = [
    pytest.param([0, 37], id="one-segment"),
    pytest.param([0, 21, 37], id="unequal-branches"),
    pytest.param([0, 1, 37], id="one-token-branch"),
    pytest.param([0, 20, 20, 37], id="empty-segment"),
]


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (3, 3), (6, 2)], ids=str)
@pytest.mark.parametrize("num_sinks", [0, 1, 2])
def test_both_implementations_equal_an_explicit_softmax(
    bounds: list[int], heads: tuple[int, int], num_sinks: int
) -> None:
    q, k, v = inputs(37, *heads, 16)
    sinks = torch.randn(num_sinks, heads[0], generator=torch.Generator().manual_seed(7))
    want = brute_force(q, k, v, sinks, bounds, 0.0).float()
    chunked = chunked_attention(q, k, v, sinks, bounds=bounds, softcap=0.0, scale=16**-0.5)
    torch.testing.assert_close(chunked, want, **tolerances.DIT_ATTENTION_F64)
    plain = sdpa_cpu_attention(q, k, v, sinks, bounds=bounds, scale=16**-0.5)
    torch.testing.assert_close(plain, want, **tolerances.DIT_ATTENTION_F64)


@pytest.mark.parametrize("softcap", [0.5, 4.0, 30.0])
def test_softcap_caps_scores_but_not_sinks(softcap: float) -> None:
    q, k, v = (4 * x for x in inputs(19, 4, 2, 8))
    sinks = torch.tensor([[3.0, -1.0, 0.0, 50.0]])
    got = dispatch.attend(q, k, v, sinks, bounds=[0, 8, 19], softcap=softcap)
    want = brute_force(q, k, v, sinks, [0, 8, 19], softcap).float()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [-torch.inf, -1e4, 80.0, 1e4])
def test_extreme_sinks_stay_finite(value: float) -> None:
    q, k, v = inputs(9, 2, 2, 8)
    sinks = torch.full((1, 2), value)
    want = brute_force(q, k, v, sinks, [0, 9], 0.0).float()
    for got in (
        chunked_attention(q, k, v, sinks, bounds=[0, 9], softcap=0.0, scale=8**-0.5),
        sdpa_cpu_attention(q, k, v, sinks, bounds=[0, 9], scale=8**-0.5),
    ):
        torch.testing.assert_close(got, want, **tolerances.DIT_ATTENTION_F64)


def test_chunks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(64, 2, 2, 8)
    sinks = torch.zeros(1, 2)
    whole = chunked_attention(q, k, v, sinks, bounds=[0, 64], softcap=2.0, scale=1.0)
    monkeypatch.setitem(attention._CHUNK_SCORES, "cpu", 2 * 64 * 5)
    cut = chunked_attention(q, k, v, sinks, bounds=[0, 64], softcap=2.0, scale=1.0)
    torch.testing.assert_close(cut, whole, **tolerances.DIT_ATTENTION_F64)


def test_memory_of_the_definition_does_not_grow_with_the_square() -> None:
    # 20,000 tokens squared would be 1.6 GB a head in fp32; one chunk holds 64 MiB for all heads.
    assert attention._CHUNK_SCORES["cpu"] * 4 <= 64 * 2**20


def test_rows_that_saw_no_key_become_zero() -> None:
    plain = torch.ones(2, 1, 4)
    lse = torch.tensor([[0.0], [-torch.inf]])
    got = sink_correction(plain, lse, torch.zeros(1, 1))
    assert torch.equal(got[0], torch.full((1, 4), 0.5))
    assert torch.equal(got[1], torch.zeros(1, 4))


def test_noncontiguous_inputs_are_taken_as_they_are() -> None:
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs(17, 4, 4, 8))
    sinks = torch.zeros(1, 4)
    got = dispatch.attend(q, k, v, sinks, bounds=[0, 17], softcap=-1.0)
    want = brute_force(q, k, v, sinks, [0, 17], 0.0).float()
    torch.testing.assert_close(got, want, **tolerances.DIT_ATTENTION_F64)


def test_bf16_stays_bf16_and_near_fp32() -> None:
    q, k, v = inputs(50, 4, 4, 16, torch.bfloat16)
    sinks = torch.zeros(1, 4)
    got = dispatch.attend(q, k, v, sinks, bounds=[0, 50], softcap=-1.0)
    want = brute_force(q, k, v, sinks, [0, 50], 0.0).float()
    assert got.dtype == torch.bfloat16
    assert float((got.float() - want).norm() / want.norm()) <= tolerances.DIT_BF16_MODULE


BF16 = torch.bfloat16
CHOICES = [
    (AttentionSetting("cpu", None, torch.float32, 16, -1.0), "sdpa_cpu"),
    (AttentionSetting("cpu", None, BF16, 16, 0.0), "sdpa_cpu"),
    (AttentionSetting("cpu", None, torch.float32, 16, 30.0), "chunked"),
    (AttentionSetting("meta", None, BF16, 16, -1.0), "chunked"),
    (AttentionSetting("cuda", (8, 0), BF16, 128, -1.0), "flash2"),
    (AttentionSetting("cuda", (8, 9), BF16, 128, -1.0), "flash2"),
    (AttentionSetting("cuda", (9, 0), BF16, 128, -1.0), "cudnn"),
    (AttentionSetting("cuda", (10, 0), BF16, 128, -1.0), "cudnn"),
    (AttentionSetting("cuda", (12, 0), BF16, 128, -1.0), "cudnn"),
    (AttentionSetting("cuda", (9, 0), BF16, 256, -1.0), "flash2"),
    (AttentionSetting("cuda", (9, 0), BF16, 20, -1.0), "efficient"),
    (AttentionSetting("cuda", (9, 0), torch.float32, 128, -1.0), "efficient"),
    (AttentionSetting("cuda", (9, 0), BF16, 128, 4.0), "chunked"),
    (AttentionSetting("cuda", (9, 0), BF16, 128, -1.0, 2), "flash2"),
]


@pytest.mark.parametrize(("setting", "name"), CHOICES, ids=lambda x: str(x).replace("torch.", ""))
def test_choice_is_a_table(setting: AttentionSetting, name: str) -> None:
    assert choose_attention(setting) == name


@pytest.mark.parametrize(
    "setting",
    [
        AttentionSetting("cpu", None, BF16, 128, -1.0, 2),
        AttentionSetting("cuda", (9, 0), BF16, 128, -1.0, 3),
        AttentionSetting("cuda", (9, 0), BF16, 128, -1.0, 4),
        AttentionSetting("cuda", (9, 0), BF16, 128, 4.0, 2),
        AttentionSetting("cuda", (9, 0), torch.float32, 128, -1.0, 2),
        AttentionSetting("cuda", (9, 0), BF16, 20, -1.0, 2),
        AttentionSetting("cuda", (9, 0), BF16, 512, -1.0, 2),
        AttentionSetting("cuda", (7, 5), BF16, 128, -1.0, 2),
    ],
    ids=str,
)
def test_version_that_cannot_run_is_refused_by_name(setting: AttentionSetting) -> None:
    with pytest.raises(ValueError, match=f"flash attention version {setting.flash_attn_version} cannot run"):
        choose_attention(setting)


# Only 9.0 was measured and tested; the others say what would be tried there.
BY_CAPABILITY = {(8, 0): "flash2", (8, 9): "flash2", (9, 0): "cudnn", (10, 0): "cudnn", (12, 0): "cudnn"}
PACKAGES = [(), ("flash-attn",), ("fa3-fwd",), ("flash-attn-4",), tuple(FLASH_PACKAGES.values())]


@pytest.mark.parametrize("packages", PACKAGES, ids="+".join)
@pytest.mark.parametrize(("capability", "name"), BY_CAPABILITY.items(), ids=str)
def test_choice_by_capability_packages_version_and_softcap(
    capability: tuple[int, int], name: str, packages: tuple[str, ...]
) -> None:
    plain = AttentionSetting("cuda", capability, BF16, 128, -1.0, packages=packages)
    capped = plain._replace(softcap=30.0)
    # No package of the family is called: none has been measured inside the engine.
    assert choose_attention(plain) == name
    assert choose_attention(capped) == "chunked"
    assert choose_attention(plain._replace(flash_attn_version=2)) == "flash2"
    for setting, version in ((capped, 2), (plain, 3), (capped, 3), (plain, 4), (capped, 4)):
        state = "installed" if FLASH_PACKAGES[version] in packages else "not installed"
        wanted = rf"flash attention version {version} cannot run .*\({FLASH_PACKAGES[version]} is {state}\)"
        with pytest.raises(ValueError, match=wanted):
            choose_attention(setting._replace(flash_attn_version=version))


def test_setting_of_this_host_knows_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_version_of", {"fa3-fwd": "0.0.3"}.get)
    found = dispatch.attention_setting(torch.device("cpu"), BF16, 128, -1.0, flash_attn_version=3)
    assert found == AttentionSetting("cpu", None, BF16, 128, -1.0, 3, ("fa3-fwd",))


def test_report_names_what_ran() -> None:
    dispatch.clear_report()
    q, k, v = inputs(5, 2, 2, 8)
    dispatch.attend(q, k, v, torch.zeros(1, 2), bounds=[0, 5], softcap=-1.0)
    assert dispatch.report() == {"attention": ("sdpa_cpu",)}
    dispatch.attend(q, k, v, torch.zeros(1, 2), bounds=[0, 5], softcap=1.0)
    assert dispatch.report() == {"attention": ("chunked", "sdpa_cpu")}


@pytest.mark.parametrize(
    ("bounds", "sinks", "key_heads"),
    [
        ([0, 4], (1, 2), 2),
        ([1, 5], (1, 2), 2),
        ([0, 4, 3, 5], (1, 2), 2),
        ([0, 5], (1, 3), 2),
        ([0, 5], (2,), 2),
        ([0, 5], (1, 2), 3),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    bounds: list[int], sinks: tuple[int, ...], key_heads: int
) -> None:
    q, k, v = inputs(5, 2, key_heads, 8)
    with pytest.raises(ValueError, match=r"do not fit|must be|must rise"):
        dispatch.attend(q, k, v, torch.zeros(sinks), bounds=bounds, softcap=-1.0)
