"""Mistral's ``tekken.json``: tokens in base64 by rank, a word pattern, and special tokens before all others.

Source: the ``mistral-common`` package, which the tests compare with.
"""

from __future__ import annotations

import msgspec

from weft.text.vocabularies.byte_level import Special, added_ids, token_bytes, tokenizer_json
from weft.text.vocabularies.converted import Converted, unusable

NAME = "tekken.json"
_OLDEST_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens by id, for files up to version 7 without a list."""
_VERSIONS_WITHOUT = ("v1", "v2", "v3", "v7")
_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class _Token(msgspec.Struct):
    rank: int
    token_bytes: str


class _Special(msgspec.Struct):
    rank: int
    token_str: str


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int
    version: str = ""


class _File(msgspec.Struct):
    """The parts of the file in use."""

    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


def convert(source: bytes) -> Converted:
    """Return the converted vocabulary for the content of tekken.json. Raises ConfigError."""
    try:
        file = msgspec.json.decode(source, type=_File)
    except msgspec.MsgspecError as error:
        raise unusable(NAME, str(error)) from error
    facts = file.config
    specials = _specials(file)
    # The file lists more tokens than the model uses: only the first ``count`` are valid.
    count = facts.default_vocab_size - len(specials)
    entries = file.vocab[: max(count, 0)]
    if len(entries) != count or [entry.rank for entry in entries] != list(range(count)):
        raise unusable(NAME, f"its first {count} tokens must have the ranks 0 to {count - 1}")
    return Converted(
        tokenizer_json=tokenizer_json(
            NAME,
            [token_bytes(NAME, entry.token_bytes) for entry in entries],
            specials,
            facts.pattern,
            first_id=len(specials),
            begin="<s>",
        ),
        named={role: text for role, text in _ROLES.items() if text in added_ids(specials)},
        special=dict(added_ids(specials)),
        pattern=facts.pattern,
    )


def _specials(file: _File) -> list[Special]:
    """Return all special tokens: the listed tokens, then fillers up to the number in the file.

    Raises ConfigError for a missing or inconsistent list, and without ``<s>``.
    """
    count = file.config.default_num_special_tokens
    if file.special_tokens is not None:
        listed = sorted(file.special_tokens, key=lambda special: special.rank)
        if [special.rank for special in listed] != list(range(len(listed))) or len(listed) > count:
            raise unusable(NAME, f"its special tokens must have the ranks 0 to at most {count - 1}")
        texts = [special.token_str for special in listed]
    elif file.config.version in _VERSIONS_WITHOUT:
        # Old versions do not list the special tokens: the list is fixed.
        texts = list(_OLDEST_SPECIALS)
    else:
        raise unusable(NAME, f"a file of version {file.config.version!r} must list its special tokens")
    texts += [f"<SPECIAL_{number}>" for number in range(len(texts), count)]
    if "<s>" not in texts:
        raise unusable(NAME, "it has no token <s>")
    return [Special(text, number) for number, text in enumerate(texts)]
