"""A streamed transformer against the resident one, on the host's shuffled streams: the same bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from magi2.checkpoint import load_streamed as module
from magi2.checkpoint.index import SINGLE_NAME
from magi2.checkpoint.load import load_transformer, refuse_meta
from magi2.checkpoint.load_streamed import Streaming, load_streamed
from magi2.config import ModelConfig
from magi2.errors import CheckpointError, EngineError, LayoutError
from magi2.model.denoiser import TransformerDenoiser
from magi2.model.streamed import StreamedLayer
from magi2.model.transformer import Magi2Transformer
from magi2.offload.lazy import HostRuntime
from magi2.offload.ring import Ring
from magi2.parallel.layout import Layout
from magi2.parallel.memory import BY_HEAD, BY_LAYER, adapter_bytes, plan
from tests.unit.magi2.model.tiny import conditioning, latents, random_model
from tests.unit.magi2.model.tiny import small_config as smaller_config


def small_config(**changes: object) -> ModelConfig:
    """Gates of a MoE head fill whole cache lines, as released: products on a CPU depend on the alignment."""
    return smaller_config(**{"moe": replace(smaller_config().moe, num_experts=8)} | changes)


def write(folder: Path, config: ModelConfig) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({k: v.clone() for k, v in random_model(config).state_dict().items()}, folder / SINGLE_NAME)
    return folder


def predict(model: Magi2Transformer) -> list[Tensor]:
    denoiser = TransformerDenoiser(model, conditioning())
    return [*denoiser.predict(*latents(), 700), *denoiser.predict(*latents(), 300)]


def equal(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def aligned(model: Magi2Transformer) -> Magi2Transformer:
    """Copy the layers' weights out of the mapped file, to where memory is aligned, as flats are."""
    for tensor in [*model.block.parameters(), *model.block.buffers()]:
        tensor.data = tensor.data.clone()
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("by", [BY_LAYER, BY_HEAD])
def test_streamed_equals_resident(tmp_path: Path, dtype: str, by: str) -> None:
    config = small_config(params_dtype=dtype)
    folder = write(tmp_path, config)
    want = predict(aligned(load_transformer(folder, config)))
    for seed in range(3):
        model = load_streamed(folder, config, Streaming(by), runtime=HostRuntime(seed=seed))
        assert equal(predict(model), want)
        assert equal(predict(model), want)
        model.streamer.close()


@pytest.mark.parametrize("num_layers", [2, 3, 5])
@pytest.mark.parametrize("by", [BY_LAYER, BY_HEAD])
def test_rings_of_any_length_and_pieces_of_any_size(tmp_path: Path, num_layers: int, by: str) -> None:
    moe = replace(small_config().moe, layers=(1,))
    config = small_config(num_layers=num_layers, mm_layers=(0,), moe=moe)
    folder = write(tmp_path, config)
    want = predict(aligned(load_transformer(folder, config)))
    assert equal(predict(load_streamed(folder, config, Streaming(by))), want)


@pytest.mark.parametrize("by", [BY_LAYER, BY_HEAD])
@pytest.mark.parametrize("num_resident", [1, 2, 4])
def test_residents_are_spread_and_change_no_bit(tmp_path: Path, num_resident: int, by: str) -> None:
    config = small_config()
    folder = write(tmp_path, config)
    want = predict(aligned(load_transformer(folder, config)))
    model = load_streamed(folder, config, Streaming(by, num_resident))
    assert equal(predict(model), want)
    streamed = {layer for layer, _ in model.streamer.places}
    assert len(streamed) == config.num_layers - num_resident
    assert (model.streamer.ring is None) == (num_resident == config.num_layers)


def test_more_slots_and_staging_change_no_bit(tmp_path: Path) -> None:
    config = small_config()
    folder = write(tmp_path, config)
    want = predict(aligned(load_transformer(folder, config)))
    for slots, registers in ((5, True), (2, False)):
        runtime = HostRuntime(seed=4, registers=registers)
        model = load_streamed(folder, config, Streaming(BY_HEAD, num_slots=slots), runtime=runtime)
        assert equal(predict(model), want)


def test_calculator_agrees_with_allocated_bytes(tmp_path: Path) -> None:
    config = ModelConfig.tiny()
    folder = write(tmp_path, config)
    for by, resident in ((BY_LAYER, 0), (BY_LAYER, 2), (BY_HEAD, 0)):
        layout = Layout(layerwise=True, resident_blocks=resident)
        needed = plan(config, layout, stream_by=by)
        model = load_streamed(folder, config, Streaming(by, resident))
        ring = model.streamer.ring
        assert ring.nbytes == pytest.approx(needed.buffers, rel=0.12)  # flats are aligned to 256 bytes
        kept = sum(tensor.nbytes for tensor in model.streamer.resident)
        assert adapter_bytes(config) + kept == pytest.approx(needed.weights, rel=0.12)
        assert ring._masters.nbytes == pytest.approx(needed.pinned, rel=0.12)


def test_loading_is_as_strict_as_ever(tmp_path: Path) -> None:
    config = small_config()
    state = random_model(config).state_dict()
    del state["block.layers.1.mlp.moe_mlp.W_up"]
    save_file({k: v.clone() for k, v in state.items()}, tmp_path / SINGLE_NAME)
    with pytest.raises(CheckpointError, match=r"^block\.layers\.1\.mlp\.moe_mlp\.W_up is missing$"):
        load_streamed(tmp_path, config, Streaming())


def test_host_without_room_is_refused_before_anything_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strict(HostRuntime):
        def register(self, memory: Tensor) -> bool:
            raise AssertionError(f"{memory.nbytes} bytes were locked")

    config = small_config()
    monkeypatch.setattr(module, "available_host_bytes", lambda: 1000)
    with pytest.raises(LayoutError, match=r"GiB of host memory are needed .* nothing was page-locked"):
        load_streamed(write(tmp_path, config), config, Streaming(), runtime=Strict())


def test_failure_to_allocate_changes_no_model_and_frees_the_masters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, unlocked = small_config(), []

    class Watching(HostRuntime):
        def unregister(self, memory: Tensor) -> None:
            unlocked.append(memory.nbytes)

    def fail(*_: object) -> None:
        raise RuntimeError("no room for slots")

    monkeypatch.setattr(Ring, "_make_slot", fail)
    with pytest.raises(RuntimeError, match="no room for slots"):
        load_streamed(write(tmp_path, config), config, Streaming(), runtime=Watching())
    assert len(unlocked) == config.num_layers


def test_defect_05_nothing_is_left_without_memory(tmp_path: Path) -> None:
    config = small_config()
    model = load_streamed(write(tmp_path, config), config, Streaming(BY_HEAD))
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    plain = nn.Module()
    plain.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(CheckpointError, match="table has no memory after loading"):
        refuse_meta(plain)


def test_skipped_layer_is_fetched_when_it_is_next_entered(tmp_path: Path) -> None:
    config = small_config()
    folder = write(tmp_path, config)
    resident, model = aligned(load_transformer(folder, config)), load_streamed(folder, config, Streaming())
    model.streamer.is_immediate = True

    def some(of: Magi2Transformer, layers: list[int]) -> list[Tensor]:
        whole = list(of.block.layers)
        of.block.layers = nn.ModuleList(whole[layer] for layer in layers)
        try:
            return predict(of)
        finally:
            of.block.layers = nn.ModuleList(whole)

    for layers in ([0], [0, 3], [0, 1, 2, 3], [0], [2, 3], [0, 1, 2, 3]):
        assert equal(some(model, layers), some(resident, layers)), layers


def test_pieces_out_of_order_are_refused(tmp_path: Path) -> None:
    config = small_config()
    model = load_streamed(write(tmp_path, config), config, Streaming(BY_HEAD))
    layer = model.block.layers[1]
    assert isinstance(layer, StreamedLayer)
    layer._cuts = list(reversed(layer._cuts))
    with pytest.raises(EngineError, match=r"about to run on the bytes|ran before the one whose results"):
        predict(model)
