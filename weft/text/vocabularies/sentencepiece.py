"""SentencePiece's ``tokenizer.model``: BPE with byte fallback, as published by Llama 2 and Mistral.

Source: sentencepiece_model.proto, and the library, which the tests compare with. A GGUF file has the same
pieces, scores and types, so ``weft.gguf.gguf_tokenizer`` makes the tokenizer.json. A model without an exact
conversion is refused with the reason.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import msgspec

from weft.common.errors import ConfigError
from weft.gguf.gguf_tokenizer import merges_by_score, tokenizer_files
from weft.text.segments import Segmentation
from weft.text.vocabularies.converted import Converted, token_text, unusable
from weft.text.vocabularies.protobuf import Value, fields, signed

NAME = "tokenizer.model"
_ALGORITHMS = {1: "unigram", 2: "BPE", 3: "words", 4: "characters"}
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED = 1, 2, 3, 4, 5
_SPACE = "\u2581"
_IDS = {"unknown": 0, "bos": 1, "eos": 2, "padding": -1}


class Piece(msgspec.Struct):
    """An entry of the vocabulary. The position is the id."""

    text: str = ""
    score: float = 0.0
    type: int = _NORMAL


class SentencePieceModel(msgspec.Struct):
    """The relevant fields of a model. Defaults are the defaults of the format."""

    pieces: list[Piece]
    algorithm: int = 1
    suffix_space: bool = False
    ids: dict[str, int] = msgspec.field(default_factory=lambda: dict(_IDS))
    normalizer: str = ""
    charsmap: bool = False
    """True if the normalizer replaces characters."""
    prefix: bool = True
    trims_spaces: bool = True
    escapes_spaces: bool = True


_TRAINER = {3: "algorithm", 24: "suffix_space", 40: "unknown", 41: "bos", 42: "eos", 43: "padding"}
_NORMALIZER = {3: "prefix", 4: "trims_spaces", 5: "escapes_spaces"}


def convert(source: bytes, config: dict[str, Any], added: Mapping[str, int] | None = None) -> Converted:
    """Return the converted vocabulary. Raises ConfigError.

    ``source``: content of tokenizer.model. ``config``: content of tokenizer_config.json. ``added``: content
    of added_tokens.json, text to id.
    """
    model = read_model(source)
    _check(model)
    # The library looks for pieces in text whose spaces are escaped, so a plain space is found nowhere.
    for piece in model.pieces:
        if piece.type == _USER and " " in piece.text:
            piece.type = _UNUSED
    # tokenizer_config.json overrides the model file, as in transformers.
    wanted = config.get("add_prefix_space")
    prefix = model.prefix if wanted is None else bool(wanted)
    _add_tokens(model.pieces, config, added or {})
    metadata: dict[str, Any] = {
        "model": "llama",
        "tokens": [piece.text for piece in model.pieces],
        "scores": [piece.score for piece in model.pieces],
        "token_type": [piece.type for piece in model.pieces],
        "add_space_prefix": prefix,
        "add_bos_token": bool(config.get("add_bos_token", True)),
        "add_eos_token": bool(config.get("add_eos_token", False)),
    }
    metadata |= {f"{role}_token_id": number for role, number in model.ids.items()}
    for role in ("bos", "eos"):
        text = token_text(config.get(f"{role}_token"))
        if text in metadata["tokens"]:
            metadata[f"{role}_token_id"] = metadata["tokens"].index(text)
    try:
        files = tokenizer_files(
            {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, prefixed=True
        )
    except ConfigError as error:
        raise unusable(NAME, error.message) from error
    where: Literal["none", "first", "each"] = "none"
    if prefix:
        where = "first" if config.get("legacy") is False else "each"
    return Converted(
        tokenizer_json=files["tokenizer.json"],
        named=json.loads(files["tokenizer_config.json"]),
        special={
            piece.text: number
            for number, piece in enumerate(model.pieces)
            if piece.type in (_UNKNOWN, _CONTROL)
        },
        segmentation=Segmentation(prefix=where),
    )


def read_model(source: bytes) -> SentencePieceModel:
    """Return the model of a file's content. Raises ConfigError for any other file."""
    if source[:64].partition(b"\n")[0].rpartition(b" ")[2].isdigit():
        raise unusable(
            NAME, "it is a tiktoken list of ranks without a word pattern, not a SentencePiece model"
        )
    model = SentencePieceModel([])
    try:
        # Fields of ModelProto: 1 pieces, 2 trainer_spec, 3 normalizer_spec.
        for number, value in fields(source):
            if number == 1:
                model.pieces.append(_piece(value))
            elif number == 2:
                _read(model, value, _TRAINER)
            elif number == 3:
                _read(model, value, _NORMALIZER)
                parts = dict(fields(_message(value)))
                model.normalizer = _message(parts.get(1, b"")).decode()
                model.charsmap = bool(parts.get(2))
    except (ValueError, struct.error) as error:
        raise unusable(NAME, f"it is not a SentencePiece model ({error})") from error
    if not model.pieces:
        raise unusable(NAME, "it is not a SentencePiece model (it has no pieces)")
    return model


def _message(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    raise ValueError("a number instead of bytes")


def _piece(value: Value) -> Piece:
    """Return one vocabulary entry of a SentencePiece message.

    Fields: 1 text, 2 score, 3 type. Raises ValueError or struct.error for invalid data.
    """
    piece = Piece()
    for number, part in fields(_message(value)):
        if number == 1:
            piece.text = _message(part).decode()
        elif number == 2:
            (piece.score,) = struct.unpack("<f", _message(part))
        elif number == 3:
            piece.type = signed(part)
    return piece


def _read(model: SentencePieceModel, value: Value, names: Mapping[int, str]) -> None:
    """Read the fields ``names`` of a nested message into ``model``. Raises ValueError for invalid data."""
    for number, part in fields(_message(value)):
        name = names.get(number, "")
        if name in model.ids:
            model.ids[name] = signed(part)
        elif name == "algorithm":
            model.algorithm = signed(part)
        elif name:
            setattr(model, name, bool(signed(part)))


def _check(model: SentencePieceModel) -> None:
    """Raise ConfigError for a model that the conversion cannot reproduce exactly: not BPE, a normalizer,
    unused pieces, other white space, or ties of scores.
    """
    if model.algorithm != 2:
        algorithm = _ALGORITHMS.get(model.algorithm, str(model.algorithm))
        raise unusable(NAME, f"its algorithm is {algorithm}; only BPE is supported")
    if model.charsmap or model.normalizer not in ("", "identity"):
        why = "is not supported; only identity without a character map is"
        raise unusable(NAME, f"its normalizer {model.normalizer!r} {why}")
    for found, why in (
        (model.trims_spaces, "it removes extra white space (remove_extra_whitespaces)"),
        (not model.escapes_spaces, "it does not escape white space (escape_whitespaces)"),
        (model.suffix_space, "it writes spaces after words (treat_whitespace_as_suffix)"),
        (any(piece.type == _UNUSED for piece in model.pieces), "it has unused pieces"),
    ):
        if found:
            raise unusable(NAME, f"{why}, which is not supported")
    _check_order(model)


def _check_order(model: SentencePieceModel) -> None:
    """Raise ConfigError if pieces with equal scores compete.

    The library merges the leftmost of such pieces first. Merges in a tokenizer.json have a total order and
    cannot express a tie. Runs of spaces are the exception: in Llama's model all have the same score.
    ``_runs_agree`` proves that their order does not matter.
    """
    plain = [piece for piece in model.pieces if piece.type == _NORMAL]
    # Only pieces made by a merge compete.
    made = {left + right for left, right in merges_by_score(*_columns(plain))}
    scores = Counter(piece.score for piece in plain if piece.text in made)
    tied = [piece for piece in plain if piece.text in made and scores[piece.score] > 1]
    others = [piece.text for piece in tied if piece.text.strip(_SPACE)]
    if others or not _runs_agree([len(piece.text) for piece in tied]):
        shown = ", ".join(repr(text) for text in (others or [piece.text for piece in tied])[:3])
        raise unusable(NAME, f"some pieces have equal scores ({shown}), so the order of merges is ambiguous")


def _columns(pieces: list[Piece]) -> tuple[list[str], list[float], list[int]]:
    return [p.text for p in pieces], [p.score for p in pieces], [p.type for p in pieces]


def _runs_agree(lengths: list[int]) -> bool:
    """Return True if two merge orders cut runs of spaces equally: leftmost first, and the order of
    ``lengths``.

    Runs up to three times the longest piece represent all runs.
    """
    known = {1, *lengths}
    ranks = {length: number for number, length in enumerate(lengths)}
    for total in range(2, 3 * max(lengths, default=0) + 1):
        # Simulate both orders on a run of ``total`` spaces; ``row`` has the lengths of the pieces.
        results = []
        for leftmost in (True, False):
            row = [1] * total
            while True:
                pairs = [
                    (0 if leftmost else ranks[a + b], at)
                    for at, (a, b) in enumerate(pairwise(row))
                    if a + b in known
                ]
                if not pairs:
                    break
                at = min(pairs)[1]
                row[at : at + 2] = [row[at] + row[at + 1]]
            results.append(row)
        if results[0] != results[1]:
            return False
    return True


def _add_tokens(pieces: list[Piece], config: dict[str, Any], added: Mapping[str, int]) -> None:
    """Append the tokens named by the files beside the model to ``pieces``.

    Gaps between ids become unused pieces. Raises ConfigError if such a file names a piece differently from
    the model.
    """
    named = {number: Piece(text, 0.0, _USER) for text, number in added.items()}
    for key, entry in (config.get("added_tokens_decoder") or {}).items():
        piece_type = _CONTROL if entry.get("special") else _USER
        named[int(key)] = Piece(entry["content"], 0.0, piece_type)
    for number, piece in sorted(named.items()):
        if number < len(pieces):
            if pieces[number].text != piece.text:
                raise unusable(
                    NAME,
                    f"token {number} is {pieces[number].text!r} in the model and {piece.text!r} in the files "
                    "beside the model",
                )
            # transformers finds such a token in raw text, with its plain space.
            if pieces[number].type == _UNUSED:
                pieces[number].type = piece.type
            continue
        # Fill a gap of ids, because the position of a piece is its id.
        pieces += [Piece(f"<unused_{n}>", 0.0, _UNUSED) for n in range(len(pieces), number)]
        pieces.append(piece)
