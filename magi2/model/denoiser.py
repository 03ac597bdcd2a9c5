"""The transformer as the sampling loop sees it: latents and a timestep in, both branches' predictions out.

Promises: packs once, at the first prediction; later steps send only the latents. One request per object. It
guides nothing and keeps no latents.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from magi2 import packing
from magi2.model.transformer import Magi2Transformer, Prepared
from magi2.packing import Conditioning, PackedBatch
from magi2.parallel.cfg import join_branches


class TransformerDenoiser:
    """A `magi2.packing.Denoiser` over a transformer and one request's conditioning.

    Args:
        transformer: With weights, on the device of the latents.
        conditioning: Text features and reference images; moved to the latents' device when packed.
        branches: Which branches to predict, in the order of the returned rows; with branch parallelism each
            rank predicts its own and gets all.
    """

    def __init__(
        self,
        transformer: Magi2Transformer,
        conditioning: Conditioning,
        *,
        branches: Sequence[int] = (packing.CONDITIONAL, packing.UNCONDITIONAL),
    ) -> None:
        self._transformer = transformer
        self._conditioning = conditioning
        self._branches = tuple(branches)
        self._cfg = transformer.groups.cfg
        self._own = self._branches if self._cfg.size == 1 else (self._branches[self._cfg.position],)
        self._packed: tuple[PackedBatch, Prepared] | None = None

    def predict(self, video: Tensor, audio: Tensor, timestep: int) -> tuple[Tensor, Tensor]:
        """Predict every branch; shapes as in `magi2.packing.Denoiser.predict`, with one row per branch."""
        batch, prepared = self._pack(video, audio)
        width = self._transformer.config.time_channel_dim
        time_row = packing.time_row(timestep, width).to(video.device)
        video_rows, audio_rows = packing.latent_rows(video.float(), audio.float())
        out: Tensor = self._transformer(prepared, video_rows, audio_rows, time_row)
        return join_branches(self._cfg, *packing.unpack(out, batch))

    def token_counts(self, video: Tensor, audio: Tensor) -> list[dict[str, int]]:
        """Return the tokens of each branch by kind, as a job records them."""
        if self._own == self._branches:
            batch, _ = self._pack(video, audio)
        else:
            batch = packing.pack(video, audio, self._conditioning, branches=self._branches)
        counts: list[dict[str, int]] = [{} for _ in self._branches]
        for part in batch.parts:
            kind = part.kind.value
            counts[part.segment][kind] = counts[part.segment].get(kind, 0) + part.length
        return counts

    def _pack(self, video: Tensor, audio: Tensor) -> tuple[PackedBatch, Prepared]:
        if self._packed is None:
            batch = packing.pack(video, audio, self._conditioning, branches=self._own)
            self._packed = batch, self._transformer.prepare(batch)
        return self._packed
