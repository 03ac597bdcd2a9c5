"""The diffusion transformer: packed rows in, predictions of the generated rows out.

Promises: names in the state dict are those of the released checkpoint; what does not change from step to
step (rotary table, blocks, embedded text and reference rows) is computed once, in `prepare`; the features
never form one matrix. It loads nothing and guides nothing. With `params_dtype` float32 everything is fp32.
Over several ranks each holds a slice of the tokens; the output is whole on every one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from magi2.config import ModelConfig
from magi2.model.adapters import PostAdapter, PreAdapter
from magi2.model.layer import Layer
from magi2.model.tokens import Tokens, cut
from magi2.packing import PackedBatch, Part, Run, clip_parts, merge_runs, time_row_of
from magi2.parallel.groups import Groups
from magi2.parallel.layout import span, split_lengths

if TYPE_CHECKING:
    from magi2.model.streamed import Streamer


@dataclass(frozen=True)
class Prepared:
    """A batch with everything that is constant over the steps.

    Args:
        tokens: The sequence as the layers see it.
        generated: Parts whose rows change from step to step.
        constant: The other parts and their embedded rows [length, S * C], in the activations' dtype.
    """

    tokens: Tokens
    generated: tuple[Part, ...]
    constant: tuple[tuple[Part, Tensor], ...]


class Block(nn.Module):
    """The layers, under the name that the checkpoint gives them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, flash_attn_version: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(config, index, dtype, flash_attn_version=flash_attn_version)
            for index in range(config.num_layers)
        )

    def forward(self, s_LSC: Tensor, tokens: Tokens) -> Tensor:
        """Run all layers on the streams, in place."""
        for layer in self.layers:
            s_LSC = layer(s_LSC, tokens)
        return s_LSC


class Magi2Transformer(nn.Module):
    """The whole model; weights are empty until a checkpoint is loaded.

    Args:
        config: Sizes and the dtype of large matrices and activations.
        flash_attn_version: Insist on a flash attention version; None leaves the choice to the dispatcher.
    """

    def __init__(self, config: ModelConfig, *, flash_attn_version: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.dtype: torch.dtype = getattr(torch, config.params_dtype)
        self.groups = Groups()
        self.streamer: Streamer | None = None
        self.pre_adapter = PreAdapter(config)
        self.block = Block(config, self.dtype, flash_attn_version)
        self.post_adapter = PostAdapter(config)

    @torch.no_grad()
    def prepare(self, batch: PackedBatch) -> Prepared:
        """Compute what the steps of one request share."""
        sp, ep = self.groups.sp, self.groups.dispatch
        lengths = split_lengths(batch.num_tokens, sp.size)
        first, last = span(lengths, sp.position)
        parts = clip_parts(batch.parts, first, last)
        runs = merge_runs(Run(p.start, p.stop, p.kind.modality) for p in parts)
        neighbours = sp.position - ep.position  # the first rank of this one's expert group
        tokens = Tokens(
            blocks=tuple(cut(runs, self.config.stream_width, batch.coords.device)),
            segment_bounds=batch.segment_bounds,
            rope=self.pre_adapter.rope(batch.coords[first:last]),
            lengths=lengths,
            moe_lengths=lengths[neighbours : neighbours + ep.size],
        )
        embedded: dict[tuple[object, int, int], Tensor] = {}
        constant = []
        for part in parts:
            if part.kind.is_generated:
                continue
            key = (part.kind, part.source, part.length)
            if key not in embedded:
                rows = batch.rows(part.kind.modality)[part.source : part.source + part.length]
                time_row = time_row_of(part.kind, 0.0, self.config.time_channel_dim).to(rows.device)
                embedded[key] = self.pre_adapter(rows, part.kind.modality, time_row).to(self.dtype)
            constant.append((part, embedded[key]))
        return Prepared(tokens, tuple(p for p in parts if p.kind.is_generated), tuple(constant))

    @torch.no_grad()
    def forward(self, prepared: Prepared, video: Tensor, audio: Tensor, time_row: Tensor) -> Tensor:
        """Predict all generated rows at one timestep.

        Args:
            prepared: Of this request.
            video: fp32 [rows, channels]; the generated parts show these rows.
            audio: fp32 [rows, channels].
            time_row: fp32 [time width] of the timestep.

        Returns:
            fp32 [L, widest channels]; rows that are not generated are zero.
        Source: the reference, inference/model/magi2_preview.py. Differs: reference-image rows get no output.
        """
        streams = self.embed(prepared, video, audio, time_row)
        streams = self.block(streams, prepared.tokens)
        out = self.project(streams, prepared)
        return self.groups.sp.join_rows(out, prepared.tokens.lengths)

    def embed(self, prepared: Prepared, video: Tensor, audio: Tensor, time_row: Tensor) -> Tensor:
        """Return the first state of the streams, [L, S, C] in the activations' dtype."""
        num_tokens, width = prepared.tokens.num_tokens, self.config.stream_width
        state = torch.empty(num_tokens, width, dtype=self.dtype, device=video.device)
        for part, rows in prepared.constant:
            state[part.start : part.stop] = rows
        shown: dict[Run, list[Part]] = {}
        for part in prepared.generated:
            source = Run(part.source, part.source + part.length, part.kind.modality)
            shown.setdefault(source, []).append(part)
        for source, parts in shown.items():
            # Both branches show the same latents: embed them once.
            for start, stop, modality in cut([source], width, video.device):
                rows = (video, audio)[modality][start:stop]
                fresh = self.pre_adapter(rows, modality, time_row)
                for part in parts:
                    first = part.start + start - part.source
                    state[first : first + stop - start] = fresh
        return state.view(num_tokens, self.config.mhc.num_streams, self.config.hidden_size)

    def project(self, s_LSC: Tensor, prepared: Prepared) -> Tensor:
        """Return the output of the generated rows from the last state of the streams."""
        state = s_LSC.flatten(1)
        out = torch.zeros(state.shape[0], self.config.out_width, device=state.device)
        runs = [Run(p.start, p.stop, p.kind.modality) for p in prepared.generated]
        for start, stop, modality in cut(runs, self.config.stream_width, state.device):
            prediction = self.post_adapter(state[start:stop], modality)
            out[start:stop, : prediction.shape[1]] = prediction
        return out
