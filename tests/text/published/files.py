"""The published chat templates in the folder of ``WEFT_REAL_FILES``, and models around them."""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
from collections.abc import Container
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from weft.text.model import TextModel

VARIABLE = "WEFT_REAL_FILES"
BOS, EOS, UNK = "<|test_bos|>", "<|test_eos|>", "<|test_unk|>"
"""Named by the configuration of every model here, and by no template."""
_MARK = re.compile(
    r"<\|[^|<>\s'\"]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<\|\"\|>|<\|[a-z_]{1,20}>|<[a-z_]{1,20}\|>|\[/?[A-Z_]{3,20}\]"
    r"|</?seed:[a-z_]{1,20}>|</?s>|<(?:start|end)_of_[a-z]+>|<sep>|</?think>|</?tool_(?:call|response)>"
    r"|</?arg_(?:key|value)>"
)
"""Matches texts that are single tokens in the tokenizers of the templates."""


def template_names(wanted: Container[str] | None = None, default: int = 1) -> list[Any]:
    """Return parameters of a test over all templates, or over the ``wanted`` ones.

    By default one of ``default`` templates runs; the other templates are slow. Without the variable the test
    is skipped.
    """
    where = os.environ.get(VARIABLE)
    if where is None:
        reason = f"{VARIABLE} names no folder of published files"
        return [pytest.param("", marks=pytest.mark.skip(reason=reason))]
    names = [path.stem for path in sorted((Path(where) / "templates").glob("*.jinja"))]
    names = [name for name in names if wanted is None or name in wanted]
    return [
        pytest.param(name, marks=pytest.mark.slow) if number % default else name
        for number, name in enumerate(names)
    ]


def source(name: str) -> str:
    return (Path(os.environ[VARIABLE]) / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def marks_of(template: str) -> list[str]:
    return sorted({*_MARK.findall(template), *_MORE.get(_family(template), ())})


_MORE = {
    "llama 3": ("<|begin_of_text|>", "<|end_of_text|>", "<|python_tag|>", "<|eom_id|>"),
    "ChatML": (
        "<|endoftext|>",
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
        "<|quad_end|>",
    ),
}
"""Tokens of the published tokenizers that the templates do not write."""


def _family(template: str) -> str:
    if "<|start_header_id|>" in template:
        return "llama 3"
    return "ChatML" if "<|im_start|>" in template else ""


@functools.cache
def model(name: str) -> TextModel:
    """Return a model with a published template and a tokenizer with the template's marks."""
    template = source(name)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = [BOS, EOS, UNK, *marks_of(template)]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    with tempfile.TemporaryDirectory() as folder:
        made.save(str(Path(folder) / "tokenizer.json"))
        named = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNK, "chat_template": template}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(named))
        return TextModel.load(folder)


def common_length(first: str, second: str) -> int:
    """Return the length of the common prefix of both texts."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in same)
