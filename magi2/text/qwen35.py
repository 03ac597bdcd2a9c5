"""The text tower: Qwen3.5 as published, cut to the layers whose output conditions the transformer.

Features are the output of layer N-3 of N, without the final norm: the model is built with its first N-2
layers only, which gives the same bits as asking the whole for that hidden state. Promises a strict load
(every weight present and of its shape, nothing unknown in the folder), no network, and one text at a
time without padding. It stays on the device it was put on; whoever stages it moves `module`.
"""

import hashlib
import re
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from magi2.errors import CheckpointError
from magi2.offload.layers import stream_layers
from magi2.offload.ring import Ring
from magi2.offload.runtime import Runtime
from magi2.text.negative import NEGATIVE_PROMPT
from magi2.text.scan import FixedOrderScan
from magi2.text.tokenizer import Offsets, PromptTokenizer, figure_tokens

NUM_UNUSED_LAYERS = 2
# Encoded texts that are kept, the latest: a prompt is often rendered again with another seed. 7,000 tokens of
# width 5,120 are 72 MB.
NUM_RECENT = 4

# The negative prompt is encoded once a process for each tower: kind of weights, library, device, text.
_negative_features: dict[tuple[str, ...], "TextFeatures"] = {}


@dataclass(frozen=True)
class TextFeatures:
    """An encoded text: features [1, L, W] in the tower's dtype, and id and characters of its L tokens."""

    features: Tensor
    token_ids: tuple[int, ...]
    offsets: Offsets


class TextEncoder:
    """Encodes texts; `module` is the network, `tokenizer` what splits texts for it."""

    def __init__(self, module: Any, tokenizer: PromptTokenizer, key: tuple[str, ...] = ()) -> None:
        self.module = module
        self.tokenizer = tokenizer
        self._key = key
        self._ring: Ring | None = None
        self._device: torch.device | None = None
        self._recent: OrderedDict[tuple[str, str], TextFeatures] = OrderedDict()

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype, device: torch.device | str) -> "TextEncoder":
        """Load the `text_encoder` folder of a checkpoint.

        Args:
            directory: Configuration, safetensors shards with their index, and tokenizer files.
            dtype: bfloat16 as released, or float32.
            device: Where the network is put.
        Raises:
            CheckpointError: Something is missing, unknown, misshapen or unreadable; all of it is named.
        """
        # Imported here: transformers takes seconds, and only the text tower needs it.
        import transformers

        # The load is checked below, tensor by tensor; the library's own tables and hints would only
        # repeat it.
        library_log: Any = transformers.utils.logging
        library_log.set_verbosity_error()
        library_log.disable_progress_bar()
        tokenizer = PromptTokenizer.load(directory)
        module = _load_module(directory, dtype).to(device)
        return cls(module, tokenizer, (_identity(directory), transformers.__version__, str(dtype)))

    @property
    def device(self) -> torch.device:
        """Where the network computes now."""
        return self._device or next(self.module.parameters()).device

    def count_tokens(self, text: str) -> int:
        """Count the tokens of a text, without encoding it."""
        return len(self.tokenizer.tokenize(text).ids)

    @torch.no_grad()
    def encode(self, text: str) -> TextFeatures:
        """Encode a text that is ready for the tokenizer (`magi2.text.prompt.encoder_text`).

        Raises:
            InvalidInput: The text has more tokens than are supported, or none.
        Source: the reference, inference/model/qwen35.py. Differs: refuses what the reference cuts off.
        """
        key = (str(self.device), text)
        if key not in self._recent:
            self._recent[key] = self._encode(text)
            if len(self._recent) > NUM_RECENT:
                self._recent.popitem(last=False)
        self._recent.move_to_end(key)
        return self._recent[key]

    @torch.no_grad()
    def _encode(self, text: str) -> TextFeatures:
        tokens = self.tokenizer.tokenize_prompt(text)
        ids = torch.tensor([tokens.ids], device=self.module.embed_tokens.weight.device)
        # Embedded where the table is: with streamed layers that is the host.
        embedded = self.module.embed_tokens(ids).to(self.device)
        with FixedOrderScan() if torch.are_deterministic_algorithms_enabled() else nullcontext():
            output = self.module(inputs_embeds=embedded, use_cache=False)
        return TextFeatures(output.last_hidden_state, tokens.ids, tokens.offsets)

    def stream(self, runtime: Runtime) -> None:
        """Keep the layers' weights on the host from now on and stream them, for a device that lacks room."""
        self._ring = stream_layers(self.module.layers, runtime)
        self.module.rotary_emb.to(runtime.device)
        self._device = runtime.device

    @property
    def is_streamed(self) -> bool:
        """Whether the layers are streamed; the network must then not be staged."""
        return self._ring is not None

    def close(self) -> None:
        """Let go of streamed weights."""
        if self._ring is not None:
            self._ring.close()

    def encode_negative(self) -> TextFeatures:
        """Encode the negative prompt, once a process for the same weights, dtype, library and device."""
        digest = hashlib.sha256(NEGATIVE_PROMPT.encode()).hexdigest()
        key = (*self._key, str(self.device), digest)
        if key not in _negative_features:
            _negative_features[key] = self._encode(NEGATIVE_PROMPT)
        return _negative_features[key]

    @staticmethod
    def special_token(encoded: TextFeatures, text: str) -> Tensor:
        """Pool the features of the first mention of the reference image.

        Args:
            encoded: What `encode` gave for `text`.
            text: The encoded text.

        Returns:
            [1, 1, W] in the features' dtype: the mean of the mention's tokens, or zeros if there are none.
        Source: the reference, inference/model/qwen35.py.
        """
        indices = figure_tokens(encoded.offsets, text)
        features = encoded.features
        if not indices:
            return torch.zeros_like(features[:, :1])
        return features[:, indices].mean(dim=1, keepdim=True)


def _load_module(directory: Path, dtype: torch.dtype) -> nn.Module:
    # Imported here: transformers takes seconds, and only the text tower needs it.
    from safetensors import SafetensorError
    from transformers import AutoConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

    # With `output_loading_info` it returns a pair, which the library's annotations do not say.
    load: Any = Qwen3_5TextModel.from_pretrained
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()
        num_layers = config.num_hidden_layers - NUM_UNUSED_LAYERS
        config.num_hidden_layers, config.layer_types = num_layers, config.layer_types[:num_layers]
        module, report = load(
            directory,
            config=config,
            dtype=dtype,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported with the rest instead of raised alone
            output_loading_info=True,
        )
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{directory} holds no readable Qwen3.5 text model: {error}") from error
    problems = loading_problems(report, num_layers)
    if problems:
        raise CheckpointError([f"{directory}: {problem}" for problem in problems])
    module.norm = nn.Identity()
    loaded: nn.Module = module.eval().requires_grad_(requires_grad=False)
    return loaded


def loading_problems(report: dict[str, Any], num_layers: int) -> list[str]:
    """Name all that is wrong with a load, from the library's report on a tower of `num_layers` layers.

    Not wrong are the parts of the published model that the tower leaves out: the vision tower, the
    language and multi-token heads and the layers behind the last one used.
    """
    unused = "|".join(str(num_layers + k) for k in range(NUM_UNUSED_LAYERS))
    left_out = re.compile(
        rf"(model\.)?(visual\.|(language_model\.)?layers\.({unused})\.).+|(model\.)?(lm_head|mtp)\..+"
    )
    unexpected = [key for key in report["unexpected_keys"] if not left_out.fullmatch(key)]
    return [
        *(f"missing tensor {key}" for key in sorted(report["missing_keys"])),
        *(f"unexpected tensor {key}" for key in sorted(unexpected)),
        *(f"misshapen tensor {key}" for key in sorted(map(str, report["mismatched_keys"]))),
        *map(str, report["error_msgs"]),
    ]


def _identity(directory: Path) -> str:
    """Digest which files a folder holds, so that other weights at the same place are not taken for these."""
    stats = [(p.name, p.stat()) for p in sorted(directory.iterdir()) if p.is_file()]
    listing = [str(directory.resolve()), *(f"{name} {s.st_size} {s.st_mtime_ns}" for name, s in stats)]
    return hashlib.sha256("\n".join(listing).encode()).hexdigest()
