"""A byte-level BPE tokenizer of any size, for checkpoints with random weights: no training data needed."""

from __future__ import annotations

import json
import string
from itertools import islice
from pathlib import Path
from typing import Any

from weft.common.errors import ConfigError

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
"""The last ids of the vocabulary; generation ends at <|im_end|>."""
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Special tokens of models with images, placed before ``SPECIAL``."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION_TEMPLATE = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% endif %}{% endfor %}{% endif %}",
)
_SPACE = "\u0120"
"""The form of a space in byte-level BPE."""


def write_tokenizer(folder: Path, vocab_size: int, max_length: int, *, vision: bool = False) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into ``folder``.

    Ids 0 to 255 are bytes. Then follow letters after a space, pairs of letters, pairs after a space, and
    triples. All are whole ASCII text, so nearly every random token streams at once. ``SPECIAL`` comes last.
    The pre-tokenizer is GPT-2's. Raise ConfigError for an impossible size.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = (*VISION, *SPECIAL) if vision else SPECIAL
    template = VISION_TEMPLATE if vision else TEMPLATE
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    wanted = vocab_size - len(alphabet) - len(special)
    merges = list(islice(_merges(), max(wanted, 0)))
    if wanted < 0 or len(merges) != wanted:
        raise ConfigError(f"no vocabulary of {vocab_size} tokens can be made")
    vocab = {token: number for number, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _merges() -> list[tuple[str, str]]:
    """Return the merges in order of rank. Both parts of a merge are earlier tokens."""
    letters = string.ascii_lowercase
    pairs = [a + b for a in letters for b in letters]
    # Each group uses only tokens of the groups before.
    return [
        *((_SPACE, letter) for letter in letters),
        *((pair[0], pair[1]) for pair in pairs),
        *((_SPACE, pair) for pair in pairs),
        *((pair, letter) for pair in pairs for letter in letters),
        *((_SPACE + pair, letter) for pair in pairs for letter in letters),
    ]
