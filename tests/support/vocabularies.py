"""Write small vocabularies in the file formats of publishers, with plain reference algorithms."""

from __future__ import annotations

import base64
import json
import random
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from weft.text.pieces import level_bytes

WORDS = [
    *(
        "the",
        "of",
        "and",
        "to",
        "in",
        "is",
        "don't",
        "I'M",
        "we'll",
        "eBay",
        "mL",
        "NaOH",
        "pH",
        "def",
        "return",
    ),
    *(
        "print",
        "import",
        "class",
        "___init__",
        "http://www.example.com/a?b=c",
        "3.14159",
        "1,000,000",
        "////",
    ),
    *("\n\n\n", "", "", "", "foo", "\t\tbar", "", "\r\n"),
]
POOLS = [
    "abcdefghijklmnopqrstuvwxyzABCDEFG",
    " \t\n\r",
    "0123456789",
    ".,;:!?'\"()[]{}<>/\\|@#$%^&*-_=+`~",
    "äöüßéèñçøåœſ",
    "абвгдежзийклмн",
    "漢字仮名交じり文世界你好々〇",
    "กขคงจฉชซ",
    "עבריתاللغة",
    "😀🎉👩‍👩‍👧🏽‍♀️",
    "\u00a0\u2003\u200b\ufeff\u2581\u001c\u0085\u0000",
    "한국어조선말",
    "ＡＢＣ１２３",
    "\u0301\u0308\u094d\u093f",
]
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Word pattern of Mistral's files."""
KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Word pattern of Kimi's tokenizer."""
KIMI_NAMED: dict[int, tuple[str, bool]] = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    6: ("<|start_header_id|>", True),
    7: ("<|end_header_id|>", True),
    9: ("[EOT]", True),
    10: ("<|im_system|>", True),
    11: ("<|tool_calls_section_begin|>", False),
    12: ("<|tool_calls_section_end|>", False),
    13: ("<|tool_call_begin|>", False),
    14: ("<|tool_call_argument_begin|>", False),
    15: ("<|tool_call_end|>", False),
    17: ("<|im_middle|>", True),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}
"""Place behind the ranks -> (text, special). Other places have no name."""


def fuzzed(count: int, seed: int = 7) -> list[str]:
    """Texts of words, of characters of all kinds, and of one script."""
    rng = random.Random(seed)
    return ["", " ", *(_text(rng) for _ in range(count))]


def _text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 30)))
    if kind < 0.7:
        return "".join(rng.choice(rng.choice(POOLS)) for _ in range(rng.randint(1, 60)))
    return "".join(rng.choices(rng.choice(POOLS) + "  ab", k=rng.randint(1, 80)))


def _corpus() -> list[str]:
    rng = random.Random(0)
    return [*fuzzed(400, 1), *(" ".join(rng.choices(WORDS, k=20)) for _ in range(100))]


@lru_cache(maxsize=4)
def trained(pattern: str, size: int = 900) -> tuple[bytes, ...]:
    """Return the tokens by rank of a byte-level BPE trained with word pattern ``pattern``."""
    made = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        _corpus(), trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    order = sorted(made.get_vocab().items(), key=lambda entry: entry[1])
    tokens = [level_bytes(text) for text, _ in order]
    singles = [bytes([byte]) for byte in range(256)]  # tekken wants the bytes in order
    return (*singles, *(token for token in tokens if len(token) > 1))


def merged(word: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """tiktoken's merges, in the plainest way: the lowest rank first, the leftmost of equals."""
    if word in ranks:
        return [ranks[word]]
    row = [word[at : at + 1] for at in range(len(word))]
    while True:
        pairs = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(row)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in row]
        at = min(pairs)[1]
        row[at : at + 2] = [row[at] + row[at + 1]]


class Plain:
    """tiktoken in plain Python."""

    def __init__(self, tokens: Sequence[bytes], pattern: str) -> None:
        self.ranks = {token: rank for rank, token in enumerate(tokens)}
        self.words = regex.compile(pattern, regex.V1)

    def encode(self, text: str) -> list[int]:
        """Ids by rank."""
        return [number for word in self.words.findall(text) for number in merged(word.encode(), self.ranks)]


def kimi_cuts(text: str, chars: int = 400_000, run: int = 25_000) -> list[str]:
    """Return the parts that Kimi's tokenizer encodes separately, found one character at a time."""
    parts = []
    for begin in range(0, len(text), chars):
        part, row, spaces = "", 0, False
        for char in text[begin : begin + chars]:
            row = row + 1 if part and char.isspace() == spaces else 1
            if row > run:
                parts.append(part)
                part, row = "", 1
            spaces = char.isspace()
            part += char
        parts.append(part)
    return parts


def kimi_config(tokens: Sequence[bytes], **changes: Any) -> dict[str, Any]:
    """tokenizer_config.json."""
    names = {
        str(len(tokens) + place): {"content": text, "special": special, "normalized": False}
        for place, (text, special) in KIMI_NAMED.items()
    }
    facts = {
        "added_tokens_decoder": names,
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>", "[EOT]", "<|im_middle|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    return facts | changes


def tiktoken_file(tokens: Sequence[bytes]) -> bytes:
    """tiktoken.model."""
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))


def tekken_file(tokens: Sequence[bytes], specials: Sequence[str] | None = None, **changes: Any) -> bytes:
    """tekken.json with 40 special tokens. None of ``specials``: a file of version 3, which lists none."""
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    config = {
        "pattern": TEKKEN,
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) + 40,
        "default_num_special_tokens": 40,
        "version": "v3" if specials is None else "v13",
    }
    file: dict[str, Any] = {"config": config | changes, "vocab": entries}
    if specials is not None:
        file["special_tokens"] = [
            {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(specials)
        ]
    return json.dumps(file).encode()


Piece = tuple[str, float, int]
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@lru_cache(maxsize=1)
def pieces() -> tuple[Piece, ...]:
    """A SentencePiece vocabulary with byte fallback, user-defined and control pieces."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    texts = [text.replace("\n", " ").replace("\0", "") for text in _corpus() if text.isascii()]
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    order = [text for text, _ in sorted(made.get_vocab().items(), key=lambda entry: entry[1])]
    result: list[Piece] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    result += [("[INST]", 0.0, CONTROL), ("[REF]", 0.0, USER), ("[REF]s", 0.0, USER)]
    result += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    long = [text for text in order if len(text) > 1]
    result += [(text, -float(number), NORMAL) for number, text in enumerate(long)]
    result += [
        (text, -1000.0 - number, NORMAL) for number, text in enumerate(t for t in order if len(t) == 1)
    ]
    return tuple(result)


def varint(value: int) -> bytes:
    """Return a number as a protocol-buffer varint; negative numbers as 64 bits."""
    value %= 1 << 64
    out = bytearray()
    while True:
        out.append(value & 0x7F | (0x80 if value > 0x7F else 0))
        value >>= 7
        if not value:
            return bytes(out)


def field(number: int, value: int | float | bytes) -> bytes:
    """Return one encoded field of a message."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def sentencepiece_file(
    entries: Sequence[Piece], trainer: Mapping[int, Any] = {}, normalizer: Mapping[int, Any] = {}
) -> bytes:
    """Return the bytes of a tokenizer.model. ``trainer`` and ``normalizer`` override fields of Llama's files
    by number.
    """
    written = [field(1, text.encode()) + field(2, score) + field(3, kind) for text, score, kind in entries]
    facts = {3: 2, 35: 1, 40: 0, 41: 1, 42: 2, 43: -1, **trainer}
    rules = {1: b"identity", 3: 1, 4: 0, 5: 1, **normalizer}
    parts = [field(1, piece) for piece in written]
    for number, values in ((2, facts), (3, rules)):
        parts.append(field(number, b"".join(field(key, value) for key, value in values.items())))
    return b"".join(parts)


class PlainPieces:
    """SentencePiece's BPE in plain Python: the highest score first, the leftmost of equals.

    User-defined pieces are cut out first, the longest first.
    """

    def __init__(self, entries: Sequence[Piece], prefix: bool = True) -> None:
        self.prefix = prefix
        self.ids = {text: number for number, (text, _, _) in enumerate(entries)}
        self.scores = {text: score for text, score, kind in entries if kind == NORMAL}
        users = sorted((text for text, _, kind in entries if kind == USER), key=len, reverse=True)
        self.users = regex.compile("(" + ("|".join(map(regex.escape, users)) or "(?!)") + ")")

    def encode(self, text: str) -> list[int]:
        """Return ids without the ids around a text."""
        if not text:
            return []
        text = (" " * self.prefix + text).replace(" ", "\u2581")
        return [number for part in self.users.split(text) if part for number in self._part(part)]

    def _part(self, text: str) -> list[int]:
        if self.users.fullmatch(text):
            return [self.ids[text]]
        row = list(text)
        while True:
            found = enumerate(pairwise(row))
            pairs = [(-self.scores[a + b], at) for at, (a, b) in found if a + b in self.scores]
            if not pairs:
                break
            at = min(pairs)[1]
            row[at : at + 2] = [row[at] + row[at + 1]]
        result: list[int] = []
        for piece in row:
            if piece in self.scores:
                result.append(self.ids[piece])
            else:
                result += [self.ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        return result


def folder(path: Path, **files: Any) -> Path:
    """Write ``files`` into a folder. ``__`` in a name becomes a dot; content other than bytes becomes
    JSON.
    """
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (path / name.replace("__", ".")).write_bytes(data)
    return path


def kimi_folder(path: Path, **config: Any) -> Path:
    """Write a folder in the published form of Kimi."""
    tokens = trained(KIMI)
    return folder(
        path,
        tiktoken__model=tiktoken_file(tokens),
        tokenizer_config__json=kimi_config(tokens, **config),
        generation_config__json={"eos_token_id": len(tokens) + 2},
    )
