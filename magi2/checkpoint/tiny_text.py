"""The text encoder of the tiny checkpoint: a random Qwen3.5 in the released layout, with its own tokenizer.

Promises the files that `transformers` writes for the published family (configuration, shards, index,
byte-level BPE), both kinds of attention layer in what the engine runs, and the same bytes for the same seed
and library versions. The tokenizer is trained on the sentences below, so that ordinary English prompts split
into plausible numbers of tokens; the features carry no meaning.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 896
NUM_LAYERS = 8

# Invented for this purpose, with the words that captions use.
_SENTENCES = """\
A tea seller pours one cup while the morning market opens behind her.
The camera moves slowly along a quiet street, low and steady, following two children with a red kite.
Rain falls on the tin roof and a dog barks once in the distance; no music, only water and wind.
Wide shot of a lighthouse at night, the beam sweeping over dark water, waves breaking against rocks.
Close view of hands shaping wet clay on a turning wheel, soft daylight from the left, warm colours.
context: a small kitchen
aesthetics: style=documentary; mood=calm; color=muted green
audio: language=English; speakers=<subject 1>,<subject 2>; ambience=distant traffic
timeline:
 - 00:00.0-00:10.0 the train leaves the station and the platform is empty again
   - dialogue <subject 1>: We are nearly there, keep walking. (00:04.5)
   - action <subject 2>: turns and smiles
reference_layer:The first frame refers to <Figure 1>
low quality, blurred picture, broken faces, extra fingers, distorted sound, noise, text on screen, flicker
jerky motion, overexposed, artificial, ugly, watermark, subtitles, cartoon, static, silent, clipped
An old violinist plays in the rain under a yellow umbrella, people passing, shoes splashing in puddles.
Snow drifts across the mountain pass as a line of lanterns climbs towards the village above the clouds.
The robot arm lifts the glass, tilts it over the table and sets it down without a sound.
Sunlight through leaves, birds singing, a river over stones, and the slow breathing of a sleeping cat.
"""


def write_text_encoder(directory: Path, *, width: int, seed: int) -> None:
    """Write `text_encoder/`: tokenizer, configuration and bf16 shards of a random multimodal Qwen3.5."""
    # Imported here: transformers takes seconds, and only this command and the text tower need it.
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration
    from transformers.utils import logging

    # The library is only partly annotated.
    make_tokenizer: Callable[..., Any] = PreTrainedTokenizerFast
    make_model: Callable[..., Any] = Qwen3_5ForConditionalGeneration
    make_config: Callable[..., Any] = Qwen3_5Config
    end = "<|endoftext|>"
    tokenizer = make_tokenizer(tokenizer_object=_train_tokenizer(), eos_token=end, pad_token=end)
    tokenizer.save_pretrained(directory)
    with torch.random.fork_rng(devices=[]):  # the library draws from the process's generator
        torch.manual_seed(seed)
        model = make_model(make_config(**_config(width)))
    _redraw(model, torch.Generator().manual_seed(seed))
    quiet: Callable[[], None] = logging.disable_progress_bar
    quiet()  # the bar would flash between the command's own lines
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="200KB")


def _train_tokenizer() -> Any:
    # Slow, and needed by `tiny-checkpoint` alone.
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 16,  # the model's table is padded, as the published one's is
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES.splitlines(keepends=True), trainer)
    return tokenizer


def _config(width: int) -> dict[str, object]:
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": width * 3 // 2,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 8192,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],  # sums to head_dim * partial_rotary_factor / 2
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": width,
        "num_position_embeddings": 16,
    }
    return {"text_config": text, "vision_config": vision}


@torch.no_grad()
def _redraw(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Give the language model weights of a size at which its features differ from token to token."""
    for name, weight in sorted(model.named_parameters()):
        if not name.startswith("model.language_model."):
            continue
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("embed_tokens.weight"):
            weight.copy_(noise)
        elif "norm" in name:
            weight.add_(noise, alpha=0.2)
        elif weight.ndim > 1:
            weight.copy_(noise * 0.08)
