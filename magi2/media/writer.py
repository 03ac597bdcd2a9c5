"""Writes a clip while its pictures are still being decoded: one encoding thread behind a short queue.

Promises: the bytes of `magi2.media.mp4.write_mp4`; at most two windows wait, then the decoder does; whatever
fails in the encoder is told by `finish` alone, so that ranks which decode together stay together; a file that
was not finished leaves nothing, and no thread outlives its writer or holds up the end of the process, even if
interrupts kept the writer from being closed. One writer writes one file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Thread, main_thread
from types import TracebackType

from torch import Tensor

from magi2.errors import EngineError, EngineFailure
from magi2.media.frames import each_resized
from magi2.media.mp4 import DEFAULT_CRF, check_encodable, encode, unfinished_file

_MAX_WAITING = 2
# How late a look at the other side may be while the queue is full or empty.
_LOOK_S = 0.05


class _Abandoned(Exception):  # noqa: N818 - no error: the file is no longer wanted
    """Ends the encoder's work."""


@dataclass(frozen=True, eq=False)
class _Work:
    samples: Tensor
    size: tuple[int, int]
    output_size: tuple[int, int] | None


class ClipWriter:
    """One file in the making; leaving the `with` block before `finish` is giving it up.

    Args:
        path: Where the finished file appears, complete, in one step.
        crf: As for `write_mp4`.
        preset: As for `write_mp4`.

    Attributes:
        path: The same.
        is_written: The file is at its path.
    """

    def __init__(self, path: Path, *, crf: int = DEFAULT_CRF, preset: str = "medium") -> None:
        self.path, self._crf, self._preset = path, crf, preset
        self.is_written = False
        self._queue: Queue[Tensor | None] = Queue(_MAX_WAITING)
        self._work: _Work | None = None
        # Known from the start, so that no interrupt can come between the start of a thread and its name.
        self._encoder = Thread(target=self._run, name="encode")
        self._failure: BaseException | None = None
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
            self._failure = error
            return
        self._work = _Work(samples_W2, shown, output_size)
        self._encoder.start()

    def add(self, frames_TYXC: Tensor) -> None:
        """Hand over the next frames, uint8, which must stay as they are; waits while two windows wait."""
        self._put(frames_TYXC)

    def finish(self) -> None:
        """Wait for the encoder; then the checked file is at its path.

        Raises:
            InvalidInput: The size is odd, or crf is out of range.
            EngineError: A track could not be encoded or written, or the file breaks the contract.
        """
        self._put(None)
        if self._encoder.is_alive():
            self._encoder.join()
        if self._failure is not None:
            raise self._failure
        if self._work is None:
            raise EngineError(f"{self.path.name}: no clip was begun")

    def close(self) -> None:
        """Stop the encoder at its next frame and wait for its end."""
        self._is_abandoned = True
        # One that is only about to start sees that it is not wanted.
        if self._encoder.is_alive():
            self._encoder.join()

    def _put(self, frames_TYXC: Tensor | None) -> None:
        """Queue frames, or the end; nothing is kept for an encoder that has ended."""
        while self._encoder.is_alive():
            try:
                self._queue.put(frames_TYXC, timeout=_LOOK_S)
            except Full:
                continue
            return

    def _look(self) -> None:
        """See whether anybody still waits for the file.

        The main thread counts as ended once the interpreter waits for the other ones: whatever kept this
        writer from being closed, the encoder does not hold that up.

        Raises:
            _Abandoned: Nobody does.
        """
        if self._is_abandoned or not main_thread().is_alive():
            raise _Abandoned

    def _run(self) -> None:
        """Encode, and keep what fails for `finish`."""
        try:
            self._look()
            if self._work is not None:
                self._encode(self._work)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self._failure = error

    def _encode(self, work: _Work) -> None:
        with unfinished_file(self.path, work.size, before_naming=self._look) as unfinished:
            frames = self._frames(work.output_size)
            encode(unfinished, frames, work.samples, work.size, crf=self._crf, preset=self._preset)
        self.is_written = True

    def _frames(self, output_size: tuple[int, int] | None) -> Iterator[Tensor]:
        while (frames_TYXC := self._next()) is not None:
            for frame_YXC in each_resized(frames_TYXC, *output_size) if output_size else frames_TYXC:
                self._look()
                yield frame_YXC

    def _next(self) -> Tensor | None:
        """Wait for the next frames, or the end."""
        while True:
            self._look()
            try:
                return self._queue.get(timeout=_LOOK_S)
            except Empty:
                continue
