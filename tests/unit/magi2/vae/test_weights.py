"""Reading checkpoint files safely, and fitting their tensors strictly."""

import argparse
import collections
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from magi2.errors import CheckpointError
from magi2.vae import weights

PATH = Path("some.pth")


class Command:
    """Unpickled in the ordinary way, this runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.mark}",)


# The zip form can be mapped into memory, the older form cannot.
FORMS = [{"_use_new_zipfile_serialization": True}, {"_use_new_zipfile_serialization": False}]


@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_both_file_forms_are_read(tmp_path: Path, form: dict[str, bool]) -> None:
    path = tmp_path / "some.pth"
    torch.save({"a": torch.arange(3.0)}, path, **form)
    assert torch.equal(weights.read_pickle(path)["a"], torch.arange(3.0))


def test_training_state_with_an_optimizer_is_read(tmp_path: Path) -> None:
    path, layer = tmp_path / "some.ckpt", nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"epoch": 3, "state_dict": layer.state_dict(), "optimizer": optimizer.state_dict()}, path)
    assert weights.read_pickle(path)["epoch"] == 3


@pytest.mark.parametrize("form", FORMS)
def test_pickle_that_runs_a_command_is_refused_by_name_and_not_run(
    tmp_path: Path, form: dict[str, bool]
) -> None:
    path, mark = tmp_path / "evil.pth", tmp_path / "ran"
    torch.save({"a": torch.ones(1), "b": Command(mark)}, path, **form)
    with pytest.raises(CheckpointError, match=r"evil\.pth: the pickle refers to \w+\.system"):
        weights.read_pickle(path)
    assert not mark.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_pickle_of_any_protocol_is_refused_by_name_and_not_run(tmp_path: Path, protocol: int) -> None:
    path, mark = tmp_path / "evil.ckpt", tmp_path / "ran"
    path.write_bytes(pickle.dumps({"b": Command(mark)}, protocol=protocol))
    with pytest.raises(CheckpointError, match=r"refers to \w+\.system"):
        weights.read_pickle(path)
    assert not mark.exists()


def test_zip_with_a_newer_pickle_protocol_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "evil.pth"
    torch.save({"b": Command(tmp_path / "ran")}, path, pickle_protocol=4)
    with pytest.raises(CheckpointError, match=r"refers to \w+\.system"):
        weights.read_pickle(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (argparse.Namespace(a=1), "argparse.Namespace"),
        (collections.defaultdict(list), "collections.defaultdict"),
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (print, "print"),
    ],
)
def test_harmless_objects_are_refused_by_name_too(tmp_path: Path, value: object, name: str) -> None:
    path = tmp_path / "some.pth"
    torch.save({"a": value}, path)
    with pytest.raises(CheckpointError, match=f"refers to {name}, which"):
        weights.read_pickle(path)


def test_refusal_does_not_advise_to_switch_the_protection_off(tmp_path: Path) -> None:
    path = tmp_path / "some.pth"
    torch.save({"a": argparse.Namespace()}, path)
    with pytest.raises(CheckpointError) as caught:
        weights.read_pickle(path)
    assert "weights_only" not in str(caught.value)
    assert "add_safe_globals" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a pickle" * 50, b"PK\x03\x04" + bytes(60), b"\x80\x02junk"])
def test_file_that_is_no_checkpoint_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.pth"
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"^some\.pth: cannot be read as a PyTorch checkpoint .*damaged"
    ):
        weights.read_pickle(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_truncated_checkpoint_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "some.pth"
    torch.save({"a": torch.randn(5000)}, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        weights.read_pickle(path)


def test_zip_without_a_pickle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "nothing")
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        weights.read_pickle(path)


def test_missing_file_is_named_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.pth: the file is missing; expected at .*gone\.pth"):
        weights.read_pickle(tmp_path / "gone.pth")


def test_checkpoint_that_is_no_dictionary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.pth"
    torch.save([torch.ones(1)], path)
    with pytest.raises(CheckpointError, match="holds a list, not a dictionary"):
        weights.read_pickle(path)


def test_fit_returns_exactly_the_wanted_tensors() -> None:
    given = {"a": torch.ones(2), "b.c": torch.ones(3), "skip.d": torch.ones(1)}
    got = weights.fit(given, {"a": (2,), "b.c": (3,)}, left_out=("skip.",), path=PATH)
    assert list(got) == ["a", "b.c"]


def test_fit_reports_every_deviation_at_once() -> None:
    given = {
        "extra": torch.ones(1),
        "shape": torch.ones(2),
        "nan": torch.tensor([1.0, float("nan")]),
        "inf": torch.tensor([-float("inf"), 1.0]),
        "int": torch.ones(1, dtype=torch.int64),
        "text": "a",
    }
    shapes = {"gone": (1,), "shape": (3,), "nan": (2,), "inf": (2,), "int": (1,), "text": (1,)}
    with pytest.raises(CheckpointError) as caught:
        weights.fit(given, shapes, left_out=(), path=PATH)
    assert sorted(caught.value.problems) == [
        "some.pth: tensor extra is not part of this network",
        "some.pth: tensor gone is missing",
        "some.pth: tensor inf holds values that are not finite",
        "some.pth: tensor int is a torch.int64, not a floating-point tensor",
        "some.pth: tensor nan holds values that are not finite",
        "some.pth: tensor shape has the shape [2], expected [3]",
        "some.pth: tensor text is a str, not a floating-point tensor",
    ]


def test_install_copies_casts_and_freezes() -> None:
    with torch.device("meta"):
        layer = nn.Linear(2, 3)
    given = {"weight": torch.full((3, 2), 1.00390625), "bias": torch.zeros(3)}
    installed = weights.install(layer, given, dtype=torch.bfloat16, device="cpu")
    given["weight"].zero_()
    # 1 + 2^-8 lies halfway between two bf16 values: the even one is taken.
    assert torch.equal(installed.weight.detach(), torch.ones(3, 2, dtype=torch.bfloat16))
    assert not any(p.requires_grad for p in installed.parameters())
    assert not installed.training
    assert weights.device_of(installed) == torch.device("cpu")


def test_json_that_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match=r"config\.json: the file is missing"):
        weights.read_json(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json: is not valid JSON"):
        weights.read_json(path)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json: must hold a JSON object"):
        weights.read_json(path)
