"""The text files of a checkpoint's folder: the vocabulary and the small files around it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from weft.common.lfs import read_model_text
from weft.config.families.facts import read_json
from weft.text.segments import Segmentation
from weft.text.vocabularies.choose import added_tokens, read_vocabulary
from weft.text.vocabularies.converted import token_text

_DEFAULT, _TOOLS = "default", "tool_use"
"""Names of the chat templates that are read."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens with a role. Each role is also a template variable."""


class TextFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed files of one folder. Missing optional files are empty."""

    tokenizer_json: str
    config: dict[str, Any]
    """Content of tokenizer_config.json."""
    named: dict[str, str]
    """Role (``NAMED``) to the token's text."""
    extra: tuple[str, ...]
    """Further special tokens, without a role."""
    eos_ids: tuple[int, ...]
    """Ids from generation_config.json and config.json."""
    chat_template: str | None
    variables: dict[str, str] = msgspec.field(default_factory=dict)
    """Template variables of further tokens, for example ``image_token``."""
    added: dict[int, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Id of each added token that the configuration lists -> ``content`` and flags. The model has a row for
    the id."""
    model_type: str = ""
    """``model_type`` of config.json."""
    segmentation: Segmentation = Segmentation()
    """Cuts of a text before encoding."""


def read_text_files(folder: str | Path) -> TextFiles:
    """Read a checkpoint's text files.

    Raises ConfigError without a usable vocabulary, and for invalid JSON.
    """
    root = Path(folder)
    config = _read_json(root, "tokenizer_config.json")
    special = {**config, **_read_json(root, "special_tokens_map.json")}
    vocabulary = read_vocabulary(root, config)
    rows = _rows(root)
    named = {role: text for role in NAMED if (text := token_text(special.get(role))) is not None}
    return TextFiles(
        tokenizer_json=vocabulary.tokenizer_json,
        config=config,
        named={**vocabulary.named, **named},
        extra=_extra_tokens(special),
        eos_ids=_eos_ids(root),
        chat_template=_chat_template(root, config),
        variables=_variables(config),
        added={number: entry for number, entry in added_tokens(root, config).items() if number < rows},
        model_type=_model_type(root),
        segmentation=vocabulary.segmentation,
    )


def _rows(root: Path) -> float:
    """Return the number of token ids of the model; infinity if config.json does not state the number."""
    config = _read_json(root, "config.json")
    text = config.get("text_config")
    value = (text if isinstance(text, dict) else config).get("vocab_size")
    return value if isinstance(value, int) else math.inf


def _model_type(root: Path) -> str:
    value = _read_json(root, "config.json").get("model_type")
    return value if isinstance(value, str) else ""


def _read_json(root: Path, name: str) -> dict[str, Any]:
    """Return the JSON object of a file; {} if the file is missing. Raises ConfigError for anything else."""
    return read_json(root, name) or {}


def _extra_tokens(special: dict[str, Any]) -> tuple[str, ...]:
    """Return the texts of special tokens without a role, without repetitions."""
    found: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = special.get(key)
        # transformers writes a list, or an object with names for the tokens.
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        found.extend(text for item in items if (text := token_text(item)) is not None)
    decoder = special.get("added_tokens_decoder")
    for entry in decoder.values() if isinstance(decoder, dict) else ():
        text = token_text(entry)
        if text is not None and isinstance(entry, dict) and entry.get("special"):
            found.append(text)
    return tuple(dict.fromkeys(found))


def _variables(config: dict[str, Any]) -> dict[str, str]:
    """Return the tokens that templates know by names other than ``NAMED``, as in transformers."""
    found = {name: value for name, value in config.items() if name.endswith("_token") and name not in NAMED}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        value = config.get(key)
        found |= value if isinstance(value, dict) else {}
    return {name: text for name, value in found.items() if (text := token_text(value)) is not None}


def _eos_ids(root: Path) -> tuple[int, ...]:
    """Return the end ids of generation_config.json and config.json, without repetitions.

    Raises ConfigError for invalid JSON.
    """
    found: list[int] = []
    config = _read_json(root, "config.json")
    nested = config.get("text_config")
    sources = [_read_json(root, "generation_config.json"), config]
    for source in [*sources, nested if isinstance(nested, dict) else {}]:
        # An id or a list of ids. ``bool`` is a subclass of ``int`` and is excluded.
        value = source.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
                found.append(item)
    return tuple(dict.fromkeys(found))


def _chat_template(root: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template, or None. A template for tools is a part of the result.

    The first file of ``_templates`` with a default template counts. A blank template is none: some base
    models have one. Raises ConfigError for an unreadable file, a Git LFS pointer or invalid JSON.
    """
    for value in _templates(root, config):
        # One template, an object of named templates, or a list [{"name": ..., "template": ...}].
        entries = value if isinstance(value, list) else [{"name": _DEFAULT, "template": value}]
        listed = {str(one.get("name")): one.get("template") for one in entries if isinstance(one, dict)}
        named = value if isinstance(value, dict) else listed
        default, tools = named.get(_DEFAULT), named.get(_TOOLS)
        if isinstance(default, str) and default.strip():
            return with_tools(default, tools) if isinstance(tools, str) and tools.strip() else default
    return None


def _templates(root: Path, config: dict[str, Any]) -> Iterator[Any]:
    """Yield the templates of each file as written, in the order of preference: chat_template.jinja (with the
    folder additional_chat_templates), tokenizer_config.json, chat_template.json, processor_config.json."""
    path = root / "chat_template.jinja"
    if path.is_file():
        tools = root / "additional_chat_templates" / f"{_TOOLS}.jinja"
        named = {_DEFAULT: read_model_text(path)}
        yield named | ({_TOOLS: read_model_text(tools)} if tools.is_file() else {})
    yield config.get("chat_template")
    for name in ("chat_template.json", "processor_config.json"):
        yield _read_json(root, name).get("chat_template")


def with_tools(default: str, tools: str) -> str:
    """Return one template of two, as transformers chooses: ``tools`` for conversations with tools, else
    ``default``."""
    # Jinja drops space before a tag at the begin of a template, and one line end at the end. ``+`` keeps all
    # other space around the tags.
    dropped = re.compile(r"\A[ \t]+(?=\{[%#](?!\+))|(?:\r\n|\r|\n)\Z")
    first, second = (dropped.sub("", source) for source in (tools, default))
    return f"{{%+ if tools +%}}{first}{{%+ else +%}}{second}{{%+ endif +%}}"
