"""The prompt tokenizer: the checkpoint's own, with the split step that the model was sampled with.

Promises the reference's token ids, and the characters that each token stands for. Nothing is ever cut
off: a text of too many tokens is refused with its count. It needs the tokenizer files of the folder and
no weight.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from magi2.contract import MAX_PROMPT_TOKENS, invalid_prompt, too_many_tokens
from magi2.errors import CheckpointError, InvalidInput
from magi2.text.prompt import reference_span

# Characters that are tokens of their own. The last range is an accident of the reference that must be
# kept: its escape for U+20000 to U+2FFFF is read as the range from the digit 0 to the letter U.
_ISOLATED = (
    (0x1100, 0x11FF),
    (0x2E80, 0xA4CF),
    (0xA840, 0xD7AF),
    (0xF900, 0xFAFF),
    (0xFE30, 0xFE4F),
    (0xFF65, 0xFFDC),
    (ord("0"), ord("U")),
)
_SPLIT_PATTERN = "([" + "".join(f"{chr(first)}-{chr(last)}" for first, last in _ISOLATED) + "])"


Offsets = tuple[tuple[int, int], ...]


class Tokens(NamedTuple):
    """A tokenized text: ids and, for each, the characters [start, stop) that it stands for."""

    ids: tuple[int, ...]
    offsets: Offsets


class PromptTokenizer:
    """Splits encoder text into tokens."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    @classmethod
    def load(cls, directory: Path) -> "PromptTokenizer":
        """Load the tokenizer of a checkpoint's `text_encoder` folder, without the network.

        Raises:
            CheckpointError: The files are absent or make no tokenizer of the fast kind.
        """
        # Imported here: transformers takes seconds, and only the text tower needs it.
        from tokenizers import Regex, pre_tokenizers
        from transformers import AutoTokenizer

        _check_files(directory)
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="right", local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{directory} holds no readable tokenizer: {error}") from error
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or backend.pre_tokenizer is None:
            raise CheckpointError(f"{directory} holds no tokenizer.json with a pre-tokenizer")
        split = pre_tokenizers.Split(Regex(_SPLIT_PATTERN), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
        return cls(backend)

    def tokenize(self, text: str) -> Tokens:
        """Split a text of any length.

        Raises:
            InvalidInput: The text holds a lone surrogate.
        """
        try:
            encoding = self._backend.encode(text)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidInput([invalid_prompt()]) from error
        return Tokens(tuple(encoding.ids), tuple(encoding.offsets))

    def tokenize_prompt(self, text: str) -> Tokens:
        """Split a text that is to be encoded.

        Raises:
            InvalidInput: The text has no token, or more than are supported; it is never cut.
        """
        tokens = self.tokenize(text)
        if len(tokens.ids) > MAX_PROMPT_TOKENS:
            raise InvalidInput([too_many_tokens(len(tokens.ids))])
        if not tokens.ids:
            raise InvalidInput("the text to encode holds no token; give a prompt with words")
        return tokens


def _check_files(directory: Path) -> None:
    """Refuse a folder without a vocabulary: the library would make an empty tokenizer of it, silently."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no folder; the checkpoint must hold text_encoder/")
    whole, parts = directory / "tokenizer.json", [directory / "vocab.json", directory / "merges.txt"]
    if not whole.is_file():
        if not all(part.is_file() for part in parts):
            raise CheckpointError(f"{directory} lacks tokenizer.json (or vocab.json with merges.txt)")
        return
    try:
        content = json.loads(whole.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{whole} is no readable tokenizer: {error}") from error
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not model.get("vocab"):
        raise CheckpointError(f"{whole} is no tokenizer: it has no model with a vocabulary")


def figure_tokens(offsets: Offsets, text: str) -> list[int]:
    """Return the indices of the tokens that the first mention of the reference image overlaps."""
    start, stop = reference_span(text) or (0, 0)
    return [k for k, (first, last) in enumerate(offsets) if max(first, start) < min(last, stop)]
