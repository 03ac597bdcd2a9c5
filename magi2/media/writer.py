"""Writes a clip while its pictures are still being decoded: one encoding thread behind a short queue.

Promises: the bytes of `magi2.media.mp4.write_mp4`; at most two windows wait, then the decoder does; whatever
fails in the encoder is told by `finish` alone, so that ranks which decode together stay together; a file that
was not finished leaves nothing, and no thread outlives its writer. One writer writes one file.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Full, Queue
from types import TracebackType

from torch import Tensor

from magi2.errors import EngineError, EngineFailure
from magi2.media.frames import each_resized
from magi2.media.mp4 import DEFAULT_CRF, check_encodable, encode, unfinished_file

_MAX_WAITING = 2
# How long a look at the encoder may be late while the queue is full.
_LOOK_S = 0.05


class _Abandoned(Exception):  # noqa: N818 - no error: the file is no longer wanted
    """Ends the encoder's work."""


class ClipWriter:
    """One file in the making; leaving the `with` block before `finish` is giving it up.

    Args:
        path: Where the finished file appears, complete, in one step.
        crf: As for `write_mp4`.
        preset: As for `write_mp4`.

    Attributes:
        path: The same.
    """

    def __init__(self, path: Path, *, crf: int = DEFAULT_CRF, preset: str = "medium") -> None:
        self.path, self._crf, self._preset = path, crf, preset
        self._queue: Queue[Tensor | None] = Queue(_MAX_WAITING)
        self._thread: ThreadPoolExecutor | None = None
        self._encoding: Future[None] | None = None
        self._refusal: EngineFailure | None = None
        self._is_abandoned = False

    def __enter__(self) -> ClipWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self, samples_W2: Tensor, size: tuple[int, int], output_size: tuple[int, int] | None) -> None:
        """Start the encoder.

        Args:
            samples_W2: The whole sound, as a `Clip` holds it.
            size: Width and height of the frames that will be added.
            output_size: Width and height of the video, if another.
        """
        shown = output_size or size
        try:
            check_encodable(shown, samples_W2, crf=self._crf)
        except EngineFailure as error:
            self._refusal = error
            return
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._encoding = self._thread.submit(self._encode, samples_W2, shown, output_size)

    def add(self, frames_TYXC: Tensor) -> None:
        """Hand over the next frames, uint8, which must stay as they are; waits while two windows wait."""
        self._put(frames_TYXC)

    def finish(self) -> None:
        """Wait for the encoder; then the checked file is at its path.

        Raises:
            InvalidInput: The size is odd, or crf is out of range.
            EngineError: A track could not be encoded or written, or the file breaks the contract.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._encoding is None:
            raise EngineError(f"{self.path.name}: no clip was begun")
        self._put(None)
        self._encoding.result()
        self.close()

    def close(self) -> None:
        """Stop the encoder at its next frame and wait for its end."""
        if self._thread is None:
            return
        self._is_abandoned = True
        self._put(None)
        self._thread.shutdown()
        self._thread = None

    def _put(self, frames_TYXC: Tensor | None) -> None:
        """Queue frames, or the end; nothing is kept for an encoder that has ended."""
        while self._encoding is not None and not self._encoding.done():
            try:
                self._queue.put(frames_TYXC, timeout=_LOOK_S)
            except Full:
                continue
            return

    def _encode(self, samples_W2: Tensor, size: tuple[int, int], output_size: tuple[int, int] | None) -> None:
        with unfinished_file(self.path, size) as unfinished:
            frames = self._frames(output_size)
            encode(unfinished, frames, samples_W2, size, crf=self._crf, preset=self._preset)

    def _frames(self, output_size: tuple[int, int] | None) -> Iterator[Tensor]:
        while (frames_TYXC := self._queue.get()) is not None:
            for frame_YXC in each_resized(frames_TYXC, *output_size) if output_size else frames_TYXC:
                if self._is_abandoned:
                    raise _Abandoned
                yield frame_YXC
        if self._is_abandoned:
            raise _Abandoned
