"""Masters in files that processes share: written once, used by all, gone with the last."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from magi2.checkpoint import load_streamed as module
from magi2.checkpoint.index import SINGLE_NAME
from magi2.checkpoint.load_streamed import Streaming, load_streamed
from magi2.model.denoiser import TransformerDenoiser
from magi2.offload.shared import SharedMemory, shared_folder
from tests.unit.magi2.model.tiny import conditioning, latents, random_model, small_config

NBYTES = 5000


def write(memory: SharedMemory, value: int) -> None:
    for block in (0, 1):
        memory.block(block, NBYTES).fill_(value)
        memory.fill_done(block, value)
    memory.all_done()


def test_second_user_maps_what_the_first_wrote_and_the_last_deletes_it(tmp_path: Path) -> None:
    first = SharedMemory(tmp_path / "all", "key")
    assert first.digest_of(0) is None
    write(first, 7)
    second = SharedMemory(tmp_path / "all", "key")
    assert [second.digest_of(block) for block in (0, 1)] == [7, 7]
    assert int(second.block(1, NBYTES)[-1]) == 7
    first.block(1, NBYTES)[0] = 9
    assert int(second.block(1, NBYTES)[0]) == 9  # the same pages
    first.close()
    assert len(list((tmp_path / "all" / "key").glob("*.flat"))) == 2
    second.close()
    assert list((tmp_path / "all").iterdir()) == []


def test_block_that_is_not_whole_is_never_taken(tmp_path: Path) -> None:
    first = SharedMemory(tmp_path, "key")
    first.block(0, NBYTES).fill_(1)
    first.all_done()  # as if it had been killed: the lock goes, the file stays
    second = SharedMemory(tmp_path, "key")
    assert second.digest_of(0) is None
    write(second, 2)
    assert int(second.block(0, NBYTES)[0]) == 2
    second.close()
    first.close()


def test_files_of_dead_users_are_cleared_by_the_next_start(tmp_path: Path) -> None:
    left = SharedMemory(tmp_path, "old")
    write(left, 3)
    os.close(left._users)  # the kernel does this for a killed process
    left._users = -1
    used = SharedMemory(tmp_path, "used")
    used.all_done()
    SharedMemory(tmp_path, "new").close()
    assert {path.name for path in tmp_path.iterdir()} == {"used"}
    used.close()


def test_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        SharedMemory(tmp_path, "key")


def test_a_cpu_shares_nothing() -> None:
    assert shared_folder(torch.device("cpu")) is None


def _wait_for_writer(folder: str, pipe: Connection) -> None:
    memory = SharedMemory(Path(folder), "key")
    pipe.send(memory.digest_of(0))
    memory.close()


def test_later_process_waits_until_the_first_has_written(tmp_path: Path) -> None:
    first = SharedMemory(tmp_path, "key")
    reader, writer = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=_wait_for_writer, args=(str(tmp_path), writer)
    )
    process.start()
    assert not reader.poll(1.0)
    write(first, 5)
    assert reader.recv() == 5
    process.join()
    first.close()


def test_two_models_share_one_set_of_masters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config()
    (tmp_path / "model").mkdir()
    weights = {name: t.clone() for name, t in random_model(config).state_dict().items()}
    save_file(weights, tmp_path / "model" / SINGLE_NAME)
    streaming = Streaming(shared_folder=tmp_path / "shared")
    first = load_streamed(tmp_path / "model", config, streaming)
    budgets = []
    monkeypatch.setattr(
        module, "agree_on_budget", lambda *_, pinned_bytes, **__: budgets.append(pinned_bytes)
    )
    second = load_streamed(tmp_path / "model", config, streaming)
    assert budgets == [0]  # nothing more is needed
    got = [TransformerDenoiser(m, conditioning()).predict(*latents(), 500)[0] for m in (first, second)]
    assert torch.equal(*got)
    files = list((tmp_path / "shared").glob("*/*.flat"))
    assert len(files) == config.num_layers
    first.streamer.close()
    second.streamer.close()
    assert list((tmp_path / "shared").iterdir()) == []


def test_full_memory_file_system_leaves_masters_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config()
    (tmp_path / "model").mkdir()
    weights = {name: t.clone() for name, t in random_model(config).state_dict().items()}
    save_file(weights, tmp_path / "model" / SINGLE_NAME)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    model = load_streamed(tmp_path / "model", config, Streaming(shared_folder=tmp_path / "shared"))
    assert list((tmp_path / "shared").iterdir()) == []
    model.streamer.close()
