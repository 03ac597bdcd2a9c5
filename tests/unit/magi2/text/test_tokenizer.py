"""The prompt tokenizer: the split in front, the characters of a token, and the refusal of long texts."""

from pathlib import Path

import pytest

from magi2.errors import CheckpointError, InvalidInput
from magi2.text.qwen35 import TextEncoder
from magi2.text.tokenizer import PromptTokenizer, Tokens, figure_tokens


@pytest.fixture(scope="module")
def tokenizer(tower: TextEncoder) -> PromptTokenizer:
    return tower.tokenizer


def pieces(tokenizer: PromptTokenizer, text: str) -> list[str]:
    return [text[start:stop] for start, stop in tokenizer.tokenize(text).offsets]


@pytest.mark.parametrize(
    "character", [*"059:;<=>?@AMU", "\u1100", "\u4e00", "\ud7af", "\uf900", "\ufe4f", "\uff65"]
)
def test_isolated_characters_never_join_their_neighbours(tokenizer: PromptTokenizer, character: str) -> None:
    text = f"the{character}the"
    assert all(piece in {character, *"the", "th", "he", "the"} for piece in pieces(tokenizer, text))


@pytest.mark.parametrize("character", ["V", "z", "\u10ff", "\u1200", "\ua4d0", "\ud7b0", "\U00020000"])
def test_characters_beside_the_ranges_are_left_to_the_tokenizer(
    tokenizer: PromptTokenizer, character: str
) -> None:
    splits = tokenizer._backend.pre_tokenizer.pre_tokenize_str(f"a{character}")
    isolated = tokenizer._backend.pre_tokenizer.pre_tokenize_str("a\u4e00")
    assert len(isolated) == 2
    assert len(splits) == 1


def test_one_word_of_digits_and_capitals_splits_into_characters(tokenizer: PromptTokenizer) -> None:
    assert pieces(tokenizer, "A10U") == list("A10U")


def test_text_is_covered_by_its_tokens(tokenizer: PromptTokenizer) -> None:
    text = "A boat, 3 people \u2013 caf\u00e9 \u6e56\n<Figure 1> end"
    covered = {k for start, stop in tokenizer.tokenize(text).offsets for k in range(start, stop)}
    assert covered == set(range(len(text)))


@pytest.mark.parametrize(
    "text", ["<Figure 1>", "see <Figure 1>.", "<Figure 1> and <Figure 1>", "e\u0301 \u6e56<Figure 1>x"]
)
def test_tokens_of_the_figure_spell_its_first_mention(tokenizer: PromptTokenizer, text: str) -> None:
    tokens = tokenizer.tokenize(text)
    indices = figure_tokens(tokens.offsets, text)
    assert indices == list(range(indices[0], indices[-1] + 1))
    found = "".join(text[slice(*tokens.offsets[k])] for k in indices)
    assert found.strip() == "<Figure 1>"
    assert tokens.offsets[indices[0]][0] <= text.index("<Figure 1>")


def test_text_without_a_figure_has_no_figure_tokens() -> None:
    assert figure_tokens(((0, 3), (3, 5)), "plain") == []


def test_tokens_that_only_touch_the_figure_or_stand_for_nothing_are_not_of_it() -> None:
    text = "ab<Figure 1>cd"
    offsets = ((0, 0), (0, 2), (2, 2), (1, 3), (3, 12), (12, 14), (0, 0), (11, 14))
    assert figure_tokens(offsets, text) == [3, 4, 7]


@pytest.mark.parametrize("count", [7000, 7001])
def test_text_is_taken_whole_up_to_the_limit_and_refused_beyond(
    tokenizer: PromptTokenizer, count: int
) -> None:
    text = "1" * count
    assert len(tokenizer.tokenize(text).ids) == count
    if count == 7000:
        assert len(tokenizer.tokenize_prompt(text).ids) == count
        return
    with pytest.raises(InvalidInput, match="prompt is 7001 tokens; at most 7000 are supported") as caught:
        tokenizer.tokenize_prompt(text)
    assert [(p.field, p.code) for p in caught.value.problems] == [("prompt", "prompt_too_long")]


def test_text_without_a_token_is_refused(tokenizer: PromptTokenizer) -> None:
    assert tokenizer.tokenize("") == Tokens((), ())
    with pytest.raises(InvalidInput, match="holds no token"):
        tokenizer.tokenize_prompt("")


def test_lone_surrogate_is_refused_as_input_not_as_a_defect(tokenizer: PromptTokenizer) -> None:
    with pytest.raises(InvalidInput, match="invalid characters"):
        tokenizer.tokenize("a \ud800 b")


def test_folder_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder"):
        PromptTokenizer.load(tmp_path / "text_encoder")


def test_folder_without_a_vocabulary_is_named(own_folder: Path) -> None:
    (own_folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks tokenizer\.json"):
        PromptTokenizer.load(own_folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": 1}', '{"model": 1, "added_tokens": []}'])
def test_broken_tokenizer_file_is_named(own_folder: Path, content: str) -> None:
    (own_folder / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="tokenizer"):
        PromptTokenizer.load(own_folder)
