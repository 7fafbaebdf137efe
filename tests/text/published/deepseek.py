"""Models of DeepSeek without a chat template of their own."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.support.text_folders import write_tokenizer
from tests.text.published.conversations import TOOLS, Messages
from weft.text.model import TextModel

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
MODELS = {"deepseek_v32": "encoding_dsv32", "deepseek_v4": "encoding_dsv4"}
_MARKS = (BOS, EOS, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜")


@functools.cache
def model(model_type: str) -> TextModel:
    """Return a model without a template of its own."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), special=_MARKS)
        path = Path(folder) / "tokenizer_config.json"
        config = json.loads(path.read_text())
        config.pop("chat_template", None)
        path.write_text(json.dumps({**config, "bos_token": BOS, "eos_token": EOS}))
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": model_type}))
        return TextModel.load(folder)


def written(
    model_type: str, messages: Messages, *, tools: bool = False, prompt: bool = True, **kwargs: Any
) -> str:
    """Return Weft's text of a conversation."""
    chat = model(model_type).chat
    return chat.encode(
        messages, tools=TOOLS if tools else (), add_generation_prompt=prompt, kwargs=kwargs
    ).text
