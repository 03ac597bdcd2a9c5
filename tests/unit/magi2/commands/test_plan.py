"""`python -m magi2 plan`: the table, a layout's rows, and its refusals."""

import pytest

from magi2.__main__ import main


def test_without_a_layout_the_usual_ones_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("--ulysses 4 ") and " 60.49 " in line for line in lines)
    assert any(line.startswith("--layerwise ") and " 11.65 " in line for line in lines)


def test_a_profile_stands_for_its_flags_and_a_flag_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile", "sp4", "--ulysses", "8", "--vae-patch-parallel", "8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("layout --ulysses 8 --vae-patch-parallel 8: 8 ranks, 540p")
    assert "43.60 GiB" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--profile", "sp5"], "--profile sp5: profiles.yaml has no such row; there are sp4,"),
        (["--tp", "8"], "12 MoE heads do not divide by --tp 8"),
        (["--ring", "2"], "--ring: attention is spread by heads"),
        (["--ulysses", "4", "--device-memory", "64"], "--ulysses 4 does not fit: 70.5 GiB of device memory"),
        (["--layerwise", "--host-memory", "100"], "265.2 GiB of host memory needed, 100.0 GiB there"),
    ],
)
def test_layout_that_cannot_work_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device_gib", "said"),
    [
        (16, "streamed by MoE head; 0 of 40 layers stay"),
        (48, "streamed by layer; 4 of 40 layers stay"),
        (139, "streamed by layer; 21 of 40 layers stay"),
    ],
)
def test_streamed_layout_uses_the_device_that_is_named(
    capsys: pytest.CaptureFixture[str], device_gib: int, said: str
) -> None:
    words = ["plan", "--layerwise", "--resident-blocks", "auto", "--resolution", "272p"]
    assert main([*words, "--device-memory", str(device_gib), "--host-memory", "400"]) == 0
    assert said in capsys.readouterr().out


def test_unqualified_world_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ulysses", "6"]) == 0
    assert "--ulysses 6 is unqualified: 6 ranks" in capsys.readouterr().err
