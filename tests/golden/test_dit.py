"""The transformer against stored numbers: primitives, modules and whole forwards, in fp32 and bf16.

How sets and cases are found: `tests.golden.dit_cases`. Tolerances: `tests.tolerances`.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import attention, dispatch, mh_moe, mhc, qk_norm_rope, swiglu7
from kernels.rms_norm import rms_norm
from magi2 import packing
from magi2.model.attention import Attention
from magi2.model.embed import rotary_table
from magi2.model.moe import MoE
from magi2.model.transformer import Magi2Transformer
from tests import tolerances
from tests.golden.discovery import matching
from tests.golden.dit_cases import (
    Case,
    batch_of,
    load_model,
    modality_runs,
    read_case,
    read_config,
    tokens_of,
)

CONFIG, WEIGHTS = r".*_config\.json", r".*_weights\.safetensors"
FULL, PRIMITIVES = r"full_.*\.safetensors", r"primitives.*\.safetensors"
MODULES = {
    name: rf"mod_{pattern}.*\.safetensors"
    for name, pattern in (("attention", "attention"), ("dense", "mlp"), ("moe", "moe"), ("mhc", "mhc"))
}
FILES = [CONFIG, WEIGHTS, FULL, PRIMITIVES, *MODULES.values()]

PRECISIONS = ("fp32", "bf16")
NUMBER_WORDS = {"one": 1, "two": 2, "three": 3, "four": 4}


def golden_cases(golden_dir: Path) -> dict[str, list[Any]]:
    cases: dict[str, list[Any]] = {"model_folder": [], "full": [], "padded": [], "primitives": []}
    cases |= {f"{name}_case": [] for name in MODULES}
    for config in matching(golden_dir, "dit", CONFIG):
        folder = config.parent
        if not list(folder.glob("*_weights.safetensors")):
            continue
        cases["model_folder"].append(folder)
        label = folder.relative_to(golden_dir).as_posix()
        for path in sorted(folder.iterdir()):
            for name, pattern in (("full", FULL), ("primitives", PRIMITIVES), *MODULES.items()):
                if re.fullmatch(pattern, path.name):
                    fixture = f"{name}_case" if name in MODULES else name
                    cases[fixture].append(pytest.param(path, id=f"{label}/{path.stem}"))
            if base_of_padded(path) is not None:
                cases["padded"].append(pytest.param(path, id=f"{label}/{path.stem}"))
    return cases


def base_of_padded(path: Path) -> Path | None:
    """The unpadded case that a `full_*_padN` case repeats, where it exists."""
    match = re.fullmatch(r"(full_.*)_pad\d+", path.stem)
    base = path.with_name(f"{match.group(1)}.safetensors") if match else path
    return base if match and base.exists() else None


def assert_rows_close(got: Tensor, want: Tensor, *, token_dim: int = 0) -> None:
    """Compare a bf16 module's result as relative norms, over all and per token."""
    got, want = (t.float().movedim(token_dim, 0).flatten(1) for t in (got, want))
    error = got - want
    assert float(error.norm() / want.norm()) <= tolerances.DIT_BF16_MODULE
    assert float((error.norm(dim=1) / want.norm(dim=1).clamp_min(1e-12)).max()) <= tolerances.DIT_BF16_TOKEN


def assert_module_close(got: Tensor, want: Tensor, precision: str, *, token_dim: int = 0) -> None:
    assert got.shape == want.shape
    if precision == "fp32":
        torch.testing.assert_close(got, want, **tolerances.DIT_FP32)
    else:
        assert_rows_close(got, want, token_dim=token_dim)


# ---- sets


def test_every_case_lies_beside_its_model(golden_dir: Path) -> None:
    folders = {path.parent for path in matching(golden_dir, "dit", CONFIG)}
    for pattern in FILES[1:]:
        assert {p.parent for p in matching(golden_dir, "dit", pattern)} <= folders


def test_model_takes_the_averaged_router_bias(model_folder: Path) -> None:
    state = load_model(model_folder, "fp32").state_dict()
    names = [name for name in state if name.endswith("router.expert_bias")]
    assert len(names) == len(read_config(model_folder).moe.layers)
    for name in names:
        assert torch.equal(state[name], state[f"{name}_ema"])


# ---- whole forwards


def run_full(case: Case, model: Magi2Transformer) -> dict[str, Tensor]:
    """Run a stored batch; outputs of all video and audio rows, reference images included."""
    batch = batch_of(case, model.config)
    prepared = model.prepare(batch)
    time_row = noisy_time_row(case, batch)
    first = model.embed(prepared, batch.video, batch.audio, time_row)
    x0 = first.flatten(1).clone()
    last = model.block(first, prepared.tokens)
    out = torch.zeros(batch.num_tokens, model.config.out_width)
    for start, stop, modality in batch.runs:
        if modality != packing.TEXT:
            rows = model.post_adapter(last.flatten(1)[start:stop], modality)
            out[start:stop, : rows.shape[1]] = rows
    return {"x0": x0, "xN": last.flatten(1), "out": out, "rope": prepared.tokens.rope}


def noisy_time_row(case: Case, batch: packing.PackedBatch) -> Tensor:
    """The row that the generated parts carry; the stored rows of all parts must follow the model's rule."""
    stored = case.tensors["in.time_token_sequence"]
    width = stored.shape[1]
    [noisy] = {tuple(stored[p.start].tolist()) for p in batch.parts if p.kind.is_generated}
    for part in batch.parts:
        clean = packing.time_row_of(part.kind, 0.0, width)
        want = torch.tensor(noisy) if part.kind.is_generated else clean
        torch.testing.assert_close(
            stored[part.start : part.stop], want.expand(part.length, width), **tolerances.TIME_ROWS
        )
    return torch.tensor(noisy)


def has_output(case: Case) -> Tensor:
    return case.tensors["in.modality_mapping"] < packing.TEXT


def test_full_fp32_equals_the_reference(full: Path) -> None:
    case = read_case(full)
    got = run_full(case, load_model(full.parent, "fp32"))
    wanted = case.of("fp32")
    rows = has_output(case)
    if "x0" in wanted:
        torch.testing.assert_close(got["x0"], wanted["x0"], **tolerances.DIT_FP32)
    if "xN" in wanted:
        torch.testing.assert_close(got["xN"], wanted["xN"], **tolerances.DIT_FP32_STREAMS)
    for name in wanted:
        if name.startswith("out"):
            torch.testing.assert_close(got["out"][rows], wanted[name][rows], **tolerances.DIT_FP32)


def test_full_bf16_is_near_the_reference(full: Path) -> None:
    case = read_case(full)
    if "out" not in case.of("bf16"):
        return
    rows = has_output(case)
    want = case.of("bf16")["out"][rows]
    error = run_full(case, load_model(full.parent, "bf16"))["out"][rows] - want
    per_token = error.norm(dim=1) / want.norm(dim=1)
    assert float(per_token.median()) <= tolerances.DIT_BF16_MEDIAN_TOKEN
    close = (per_token <= tolerances.DIT_BF16_CLOSE_TOKEN).float().mean()
    assert float(close) >= tolerances.DIT_BF16_CLOSE_SHARE
    assert float(error.norm() / want.norm()) <= tolerances.DIT_BF16_FORWARD


def test_full_rotary_table_equals_the_reference(full: Path) -> None:
    case = read_case(full)
    model = load_model(full.parent, "fp32")
    got = model.pre_adapter.rope(case.tensors["in.coords_mapping"])
    torch.testing.assert_close(got, case.tensors.get("rope", got), **tolerances.DIT_FP32)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_forward_gives_exactly_the_generated_rows(full: Path, precision: str) -> None:
    case = read_case(full)
    model = load_model(full.parent, precision)
    batch = batch_of(case, model.config)
    out = model(model.prepare(batch), batch.video, batch.audio, noisy_time_row(case, batch))
    want = run_full(case, model)["out"]
    for part in batch.parts:
        if not part.kind.is_generated:
            want[part.start : part.stop] = 0
    torch.testing.assert_close(out, want, **tolerances.DIT_FP32)


def test_padding_changes_no_real_row(padded: Path) -> None:
    base = base_of_padded(padded)
    assert base is not None
    want = read_case(base)
    got = run_full(read_case(padded), load_model(padded.parent, "fp32"))["out"]
    rows = has_output(want)
    real = got[: rows.shape[0]][rows]
    torch.testing.assert_close(real, want.of("fp32")["out"][rows], **tolerances.DIT_FP32)


# ---- modules; stored activations stand in modality order, ours in packed order


class Module:
    """One stored module case in one precision."""

    def __init__(self, path: Path, precision: str) -> None:
        self.case = read_case(path)
        self.precision = precision
        self.model = load_model(path.parent, precision)
        self.layer = self.model.block.layers[int(self.case.notes["layer"])]
        self.tokens = tokens_of(self.case, self.model)
        self.wanted = self.case.of(precision)

    def packed(self, name: str) -> Tensor:
        """A stored activation, in packed order."""
        return self.wanted[name][self.case.tensors["inv_permute_mapping"]]

    def check(self, name: str, got: Callable[[], Tensor], *needs: str, is_packed: bool = False) -> None:
        """Compare a result in packed order with the stored activation, where the file has what it needs."""
        if not {name, *needs} <= self.wanted.keys():
            return
        value = got()
        value = value if is_packed else value[self.case.tensors["permute_mapping"]]
        assert_module_close(value, self.wanted[name], self.precision)

    def blockwise(self, function: Callable[[Tensor, int], Tensor], x: Tensor) -> Tensor:
        """Apply a function of rows and their modality to packed rows."""
        parts = [function(x[b.start : b.stop], b.modality) for b in self.tokens.blocks]
        return torch.cat(parts)

    def pre_norm(self, norm: Callable[[Tensor, int], Tensor]) -> Callable[[], Tensor]:
        x = self.packed("in")
        return lambda: self.blockwise(norm, x).to(x.dtype)

    def linear(self, function: Callable[[Tensor, int], Tensor], name: str) -> Callable[[], Tensor]:
        return lambda: self.blockwise(function, self.packed(name))


def test_modules_know_the_order_of_modalities() -> None:
    runs = modality_runs(torch.tensor([0, 0, 1, 2, 2, 0]), [0, 4, 6])
    assert [tuple(r) for r in runs] == [(0, 2, 0), (2, 3, 1), (3, 4, 2), (4, 5, 2), (5, 6, 0)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_projections_equal_the_reference(attention_case: Path, precision: str) -> None:
    m = Module(attention_case, precision)
    module: Attention = m.layer.attention
    m.check("pre_norm", m.pre_norm(module.pre_norm), "in")
    m.check("linear_g", m.linear(module.linear_g, "pre_norm"), "pre_norm")
    m.check("linear_qkv", m.linear(module.linear_qkv, "pre_norm"), "pre_norm")


def stored_qkv(m: Module) -> list[Tensor]:
    """The stored projection as q, k and v [L, heads, D] in packed order."""
    config = m.model.config
    heads = [config.num_heads, config.num_query_groups, config.num_query_groups]
    parts = torch.split(m.packed("linear_qkv"), [h * config.head_dim for h in heads], dim=1)
    return [p.reshape(p.shape[0], -1, config.head_dim) for p in parts]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_queries_and_keys_equal_the_reference(attention_case: Path, precision: str) -> None:
    m = Module(attention_case, precision)
    norms = {"q_rope": m.layer.attention.q_norm, "k_rope": m.layer.attention.k_norm}
    for index, (name, norm) in enumerate(norms.items()):

        def rotated(index: int = index, norm: Any = norm) -> Tensor:
            raw = stored_qkv(m)[index]
            out = torch.empty(raw.shape)
            for a, b, modality in m.tokens.blocks:
                dispatch.norm_rope(raw[a:b], norm.weight_of(modality), m.tokens.rope[a:b], out[a:b])
            return out

        m.check(name, rotated, "linear_qkv", is_packed=True)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_core_and_output_equal_the_reference(attention_case: Path, precision: str) -> None:
    m = Module(attention_case, precision)
    module: Attention = m.layer.attention

    def core() -> Tensor:
        value = stored_qkv(m)[2]
        query, key = (m.wanted[name].to(value.dtype) for name in ("q_rope", "k_rope"))
        return dispatch.attend(
            query, key, value, module.sinks, bounds=m.tokens.segment_bounds, softcap=module.softcap
        )

    def finished() -> Tensor:
        return module.finish(m.wanted["core_out"], m.packed("linear_g"), m.tokens)

    m.check("core_out", core, "q_rope", "k_rope", "linear_qkv", is_packed=True)
    m.check("out", finished, "core_out", "linear_g")
    m.check("out", lambda: module(m.packed("in"), m.tokens), "in")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_dense_mlp_equals_the_reference(dense_case: Path, precision: str) -> None:
    m = Module(dense_case, precision)
    m.check("pre_norm", m.pre_norm(m.layer.mlp.pre_norm), "in")
    m.check("up_gate_proj", m.linear(m.layer.mlp.up_gate_proj, "pre_norm"), "pre_norm")
    m.check("out", lambda: m.layer.mlp(m.packed("in"), m.tokens), "in")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_moe_linears_equal_the_reference(moe_case: Path, precision: str) -> None:
    m = Module(moe_case, precision)
    module: MoE = m.layer.mlp
    m.check("pre_norm", m.pre_norm(module.pre_norm), "in")
    m.check("split_linear", m.linear(module.split_linear, "pre_norm"), "pre_norm")
    for name in ("shared_expert", "modality_specific_shared_expert"):
        down = getattr(module, f"{name}_fc2")
        m.check(f"{name}_fc1", m.linear(getattr(module, f"{name}_fc1"), "pre_norm"), "pre_norm")
        m.check(
            f"{name}_fc2",
            lambda name=name, down=down: m.blockwise(down, swiglu7.swiglu7(m.packed(f"{name}_fc1"))),
            f"{name}_fc1",
        )


def moe_heads(m: Module) -> Tensor:
    """The stored split projection per MoE head, in the stored (modality) order."""
    return m.wanted["split_linear"].unflatten(1, (m.model.config.moe.num_heads, -1))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_moe_router_logits_equal_the_reference(moe_case: Path, precision: str) -> None:
    m = Module(moe_case, precision)
    experts = m.layer.mlp.moe_mlp
    num_heads = m.model.config.moe.num_heads
    got = mh_moe.router_logits(moe_heads(m), experts.gate.view(num_heads, -1, experts.gate.shape[1]))
    assert_module_close(got, m.wanted["router_logits"], precision, token_dim=1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_moe_routes_equal_the_reference(moe_case: Path, precision: str) -> None:
    m = Module(moe_case, precision)
    scale = m.model.config.moe.route_scale
    routes = m.layer.mlp.moe_mlp.route(moe_heads(m))
    got_order, want_order = routes.experts.argsort(dim=-1), m.wanted["topk_indices"].argsort(dim=-1)
    want_experts = m.wanted["topk_indices"].long().gather(-1, want_order)
    assert torch.equal(routes.experts.gather(-1, got_order), want_experts)
    torch.testing.assert_close(
        routes.weights.gather(-1, got_order) / scale,
        m.wanted["topk_probs_unscaled"].gather(-1, want_order),
        **(tolerances.DIT_FP32 if precision == "fp32" else tolerances.DIT_BF16_PROBS),
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_moe_sorted_routes_equal_the_reference(moe_case: Path, precision: str) -> None:
    m = Module(moe_case, precision)
    routes = m.layer.mlp.moe_mlp.route(moe_heads(m))
    got = sorted_form(routes, m.model.config.moe.num_experts)
    assert torch.equal(got["gather_ids"], m.wanted["gather_ids"].long())
    assert torch.equal(got["expert_offsets"], m.wanted["expert_offsets"].long())
    tolerance = tolerances.DIT_FP32 if precision == "fp32" else tolerances.DIT_BF16_PROBS
    torch.testing.assert_close(got["sorted_probs"], m.wanted["sorted_probs"], **tolerance)


def sorted_form(routes: mh_moe.Routes, num_experts: int) -> dict[str, Tensor]:
    """Our per-head sorted routes in the reference's flat form."""
    num_heads, _, top_k = routes.experts.shape
    grouped = mh_moe.sort_routes(routes.experts, num_experts)
    num_routes = grouped.order.shape[1]
    first_place = torch.arange(num_heads)[:, None] * num_routes
    offsets = (grouped.offsets[:, :-1] + first_place).flatten()
    return {
        "gather_ids": (grouped.order // top_k).flatten(),
        "expert_offsets": torch.cat([offsets, torch.tensor([num_heads * num_routes])]),
        "sorted_probs": routes.weights.flatten(1).gather(1, grouped.order).flatten(),
    }


@pytest.mark.parametrize("precision", PRECISIONS)
def test_moe_experts_and_output_equal_the_reference(moe_case: Path, precision: str) -> None:
    m = Module(moe_case, precision)
    module: MoE = m.layer.mlp
    assert_module_close(module.moe_mlp(moe_heads(m)), m.wanted["moe_heads_out"], precision)
    m.check(
        "merge_linear",
        lambda: m.blockwise(module.merge_linear, m.packed("moe_heads_out").flatten(1)),
        "moe_heads_out",
    )
    m.check("out", lambda: module(m.packed("in"), m.tokens), "in")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("half", ["attn", "mlp"])
def test_stream_gates_equal_the_reference(mhc_case: Path, precision: str, half: str) -> None:
    m = Module(mhc_case, precision)
    streams = streams_before(m, half)
    raw = torch.cat(
        [
            mhc.mixing_logits(streams[a:b], m.layer.mixing_weights(half, modality))
            for a, b, modality in m.tokens.blocks
        ]
    )
    raw = raw[m.case.tensors["permute_mapping"]]
    if precision == "fp32":
        torch.testing.assert_close(raw, m.wanted[f"mhc_{half}.h_fused"], **tolerances.DIT_FP32_GATES)
    else:
        assert_rows_close(raw, m.wanted[f"mhc_{half}.h_fused"])
    gates = m.layer.read(streams, half, m.tokens).gates
    m.check(f"mhc_{half}.h_pre", lambda: gates.pre)
    m.check(f"mhc_{half}.h_post", lambda: gates.post)
    m.check(f"mhc_{half}.h_res", lambda: gates.res)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("half", ["attn", "mlp"])
def test_streams_are_read_and_written_as_in_the_reference(mhc_case: Path, precision: str, half: str) -> None:
    m = Module(mhc_case, precision)
    streams = streams_before(m, half)
    reading = m.layer.read(streams, half, m.tokens)
    m.check(f"{half}.in", lambda: reading.x)
    m.layer.write(streams, reading.gates, m.packed(f"{half}.out"), m.tokens)
    m.check("s_mid" if half == "attn" else "s_out", lambda: streams.flatten(1))


def streams_before(m: Module, half: str) -> Tensor:
    stored = m.packed("s_in" if half == "attn" else "s_mid")
    return stored.unflatten(1, (m.model.config.mhc.num_streams, -1)).clone()


# ---- primitives


def keyed(case: Case, pattern: str) -> Iterable[re.Match[str]]:
    """Matches of a pattern among the keys of a file."""
    return [match for key in case.tensors if (match := re.fullmatch(pattern, key))]


def test_primitive_swiglu7(primitives: Path) -> None:
    t = read_case(primitives).tensors
    if "swiglu7.x" in t:
        torch.testing.assert_close(
            swiglu7.swiglu7(t["swiglu7.x"]), t["swiglu7.y_fp32"], **tolerances.DIT_FP32
        )
    if "swiglu7.x_bf16" in t:
        assert_rows_close(swiglu7.swiglu7(t["swiglu7.x_bf16"]), t["swiglu7.y_bf16"])


def test_primitive_rotary_tables(primitives: Path) -> None:
    case = read_case(primitives)
    for match in keyed(case, r"rope\.emb_(\d+)"):
        bands = case.tensors[f"rope.bands_{match.group(1)}"]
        got = rotary_table(case.tensors["rope.coords"], bands)
        torch.testing.assert_close(got, case.tensors[match.group(0)], **tolerances.DIT_FP32)


def test_primitive_rotation(primitives: Path) -> None:
    t = read_case(primitives).tensors
    if "rope.x" in t:
        table = t[f"rope.emb_{t['rope.x'].shape[-1]}"]
        got = qk_norm_rope.rotate(t["rope.x"], table)
        torch.testing.assert_close(got, t["rope.y"], **tolerances.DIT_FP32)


def test_primitive_time_embeddings(primitives: Path) -> None:
    case = read_case(primitives)
    for match in keyed(case, r"time\.emb(\d+)"):
        got = packing.time_embedding(case.tensors["time.t"], int(match.group(1)))
        torch.testing.assert_close(got, case.tensors[match.group(0)], **tolerances.DIT_FP32)


def test_primitive_sinkhorn(primitives: Path) -> None:
    t = read_case(primitives).tensors
    if "sinkhorn.h" in t:
        torch.testing.assert_close(mhc.sinkhorn(t["sinkhorn.h"]), t["sinkhorn.m"], **tolerances.DIT_FP32)


def test_primitive_rms_norm(primitives: Path) -> None:
    t = read_case(primitives).tensors
    if "rms.x" not in t:
        return
    groups = t["rms.groups"].tolist()
    weights = t["rms.w"].view(len(groups), -1)
    got = torch.cat([rms_norm(rows, w) for rows, w in zip(t["rms.x"].split(groups), weights, strict=True)])
    torch.testing.assert_close(got, t["rms.y"], **tolerances.DIT_FP32)
    if "rms.y_bf16" in t:
        assert_rows_close(got.bfloat16(), t["rms.y_bf16"])


def test_primitive_routes(primitives: Path) -> None:
    t = read_case(primitives).tensors
    if "route.logits" not in t:
        return
    config = read_config(primitives.parent).moe
    top_k, num_experts = t["route.indices"].shape[-1], t["route.logits"].shape[-1]
    routes = mh_moe.choose_experts(
        t["route.logits"],
        t["route.bias"],
        top_k=top_k,
        route_norm=config.route_norm,
        route_scale=config.route_scale,
    )
    got_order, want_order = routes.experts.argsort(dim=-1), t["route.indices"].argsort(dim=-1)
    want_experts = t["route.indices"].long().gather(-1, want_order)
    assert torch.equal(routes.experts.gather(-1, got_order), want_experts)
    got_weights = routes.weights.gather(-1, got_order)
    torch.testing.assert_close(got_weights, t["route.probs"].gather(-1, want_order), **tolerances.DIT_FP32)
    flat = sorted_form(routes, num_experts)
    assert torch.equal(flat["gather_ids"], t["route.gather_ids"].long())
    assert torch.equal(flat["expert_offsets"], t["route.expert_offsets"].long())
    torch.testing.assert_close(flat["sorted_probs"], t["route.sorted_probs"], **tolerances.DIT_FP32)


def attention_inputs(t: dict[str, Tensor], variant: str) -> tuple[list[Tensor], Tensor, float]:
    """Return q, k, v, the sinks and the softcap that a stored output's name stands for."""
    suffix = "_gqa" if "gqa" in variant else ""
    qkv = [t["attn.q"], t[f"attn.k{suffix}"], t[f"attn.v{suffix}"]]
    softcap = re.search(r"softcap([\d.]+)", variant)
    count = re.search(r"([a-z]+)_sinks", variant)
    sinks = t[f"attn.sinks{NUMBER_WORDS[count.group(1)] if count else 1}"]
    if "nosink" in variant:
        sinks = torch.full_like(sinks, -torch.inf)
    return qkv, sinks, float(softcap.group(1)) if softcap else -1.0


def test_primitive_attention_in_fp32_equals_float64(primitives: Path) -> None:
    case = read_case(primitives)
    for match in keyed(case, r"attn\.out_(.*)_f64as32"):
        qkv, sinks, softcap = attention_inputs(case.tensors, match.group(1))
        q, k, v = (x.float() for x in qkv)
        bounds = cumulative(case.tensors["attn.cu_seqlens"], q.shape[0])
        got = dispatch.attend(q, k, v, sinks, bounds=bounds, softcap=softcap)
        torch.testing.assert_close(got, case.tensors[match.group(0)], **tolerances.DIT_ATTENTION_F64)
        scale = q.shape[2] ** -0.5
        got = attention.chunked_attention(q, k, v, sinks, bounds=bounds, softcap=softcap, scale=scale)
        torch.testing.assert_close(got, case.tensors[match.group(0)], **tolerances.DIT_ATTENTION_F64)


def test_primitive_attention_in_bf16_is_near_the_reference(primitives: Path) -> None:
    case = read_case(primitives)
    for match in keyed(case, r"attn\.out_(.*)_bf16"):
        (q, k, v), sinks, softcap = attention_inputs(case.tensors, match.group(1))
        bounds = cumulative(case.tensors["attn.cu_seqlens"], q.shape[0])
        got = dispatch.attend(q, k, v, sinks, bounds=bounds, softcap=softcap)
        assert_rows_close(got, case.tensors[match.group(0)])


def cumulative(cu_seqlens: Tensor, length: int) -> list[int]:
    """Segment bounds, whether the file stores bounds or lengths."""
    values = cu_seqlens.tolist()
    if values[0] == 0 and values[-1] == length:
        return list(values)
    return torch.cat([torch.zeros(1, dtype=torch.int64), cu_seqlens.long().cumsum(0)]).tolist()
