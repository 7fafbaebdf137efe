"""Example command, printed when the server is ready: a shell command with a request for the model."""

from __future__ import annotations

import base64
import json
import re
import shlex
from pathlib import Path
from typing import Any

from weft.common import env
from weft.config.about import EXAMPLE_IMAGE, About, about
from weft.config.resolved import EngineConfig
from weft.config.sections.front_section import FrontSection
from weft.media.decode import can_decode
from weft.text.tokenizer_files import read_text_files

WORDS = 32
"""Output tokens for a continued text, which may never end by itself."""


def command(url: str, config: EngineConfig, section: FrontSection, *, chats: bool) -> str:
    """Return a ``curl`` command for a server at ``url``: an embedding, a continued text, or a chat, with an
    image if the model takes images. ``chats``: True if there is a chat template. The command contains no
    key."""
    route, body = _request(config, chats)
    data = shlex.quote(json.dumps({"model": config.served_names[0], **body}))
    key = _key_header(section)
    return f"curl {url}{route}{key} -H 'Content-Type: application/json' -d {data}"


def takes_images(config: EngineConfig) -> bool:
    """Return True if the model has a vision tower and this server can decode images."""
    return config.spec.vision is not None and config.media.limit_mm_per_prompt > 0 and can_decode()


def _request(config: EngineConfig, chats: bool) -> tuple[str, dict[str, Any]]:
    """Return (route, fields of the body except the model's name). The route follows from the model:
    embeddings without an output head, completions without a chat template, else chat."""
    known = about(config.model_path)
    if not config.spec.head:
        return "/v1/embeddings", {"input": known.question}
    if not chats:
        return "/v1/completions", {"prompt": known.completion, "temperature": 0, "max_tokens": WORDS}
    content = _with_image(config, known) if takes_images(config) else known.question
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "temperature": 0}


def _with_image(config: EngineConfig, known: About) -> list[dict[str, Any]]:
    url = example_image(config, known)
    text = known.question if known.image else "Which letters and digits are in this image?"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]


def example_image(config: EngineConfig, known: About) -> str:
    """Return a data URL: the model's own example image, or a general image."""
    file = Path(config.model_path) / known.image if known.image else EXAMPLE_IMAGE
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def has_template(config: EngineConfig, section: FrontSection) -> bool:
    """Return True if the model or ``--chat-template`` brings a chat template, even a broken template. Reads
    the tokenizer's files."""
    own = read_text_files(config.tokenizer_path).chat_template
    return section.chat_template is not None or own is not None


def _key_header(section: FrontSection) -> str:
    """Return the ``curl`` option with the key; "" for a server without keys. A key is never printed: the
    option names the environment variable of the key, or the place where the key was given."""
    if not section.api_key:
        return ""
    held = env.get("WEFT_API_KEY")
    first = re.split(r"[,\s]", held)[0]
    if first not in section.api_key:
        return " -H 'Authorization: Bearer <a key of --api-key, or of api-key in the file of --config>'"
    shown = "$WEFT_API_KEY" if held == first else "${WEFT_API_KEY%%[, ]*}"
    return f' -H "Authorization: Bearer {shown}"'
