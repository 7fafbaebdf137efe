"""A checkpoint's tokenizer files from the metadata of a GGUF file.

There are two vocabulary types:

* ``gpt2``: byte-level BPE with merges. ``tokenizer.ggml.pre`` names the pre-tokenization rule.
* ``llama``: SentencePiece's BPE. Scores give the order of merges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.common.errors import ConfigError
from weft.gguf.word_rules import DEEPSEEK_LLM, DEEPSEEK_V3, DIGITS, HAN, KIMI_LIMITS, QWEN35, TEKKEN

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> tuple[str, ...]:
    """Return the common pattern: words, numbers as ``digits``, runs of symbols, and white space."""
    return (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}{_REST}",)


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = f"{_CONTRACTIONS}?"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)

WORDS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": _GPT2,
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    ),
    "llama-bpe": _words(r"\p{N}{1,3}"),
    "llama3": _words(r"\p{N}{1,3}"),
    "llama-v3": _words(r"\p{N}{1,3}"),
    "smaug-bpe": _words(r"\p{N}{1,3}"),
    "falcon3": _words(r"\p{N}{1,3}"),
    "pixtral": _words(r"\p{N}{1,3}"),
    "qwen2": _words(r"\p{N}"),
    "deepseek-r1-qwen": _words(r"\p{N}"),
    "qwen35": (QWEN35,),
    "gpt-4o": (_CASED,),
    "tekken": (TEKKEN,),
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-v3": DEEPSEEK_V3,
    "smollm": (DIGITS, *_GPT2),
    "kimi-k2": (HAN,),
}
"""``tokenizer.ggml.pre`` -> patterns or ``DIGITS``, applied in order to the remaining pieces."""
NORMALIZED = ("qwen2", "qwen35", "deepseek-r1-qwen")
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3", "pixtral", "tekken", "kimi-k2")
"""Rules with ``ignore_merges``: a piece in the vocabulary becomes one token without merges."""

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
SEGMENTATION = "weft_segmentation"
"""Key of tokenizer_config.json for ``weft.text.segments.Segmentation``. tokenizer.json has no such field."""
_TOOLS = "tool_use"
"""Name of the chat template for tools."""
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


class GgufVocabulary:
    """Token facts in the metadata. Raises ConfigError for missing or inconsistent facts."""

    def __init__(self, metadata: Mapping[str, Any], prefixed: bool = False) -> None:
        """``prefixed``: see ``tokenizer_files``. Raises ConfigError."""
        self.metadata = metadata
        self.prefixed = prefixed
        self.tokens = self._texts("tokens")
        kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(self.tokens)
        if len(kinds) != len(self.tokens):
            raise _fail("token_type", f"has {len(kinds)} entries for {len(self.tokens)} tokens")
        self.kinds: list[int] = list(kinds)
        self.ids = {token: i for i, token in reversed(list(enumerate(self.tokens)))}

    def flag(self, key: str, default: bool) -> bool:
        """Return the value of ``key`` as a bool."""
        return bool(self.metadata.get(f"tokenizer.ggml.{key}", default))

    def token(self, role: str) -> str | None:
        """Return the text of the token with the role bos, eos, unknown or padding; None if missing."""
        number = self.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if isinstance(number, int) and 0 <= number < len(self.tokens):
            return self.tokens[number]
        return None

    @property
    def merges(self) -> list[tuple[str, str]]:
        """Merges in order of precedence.

        The two parts of a merge contain no spaces: each byte is written as a letter. Raises ConfigError.
        """
        pairs = [tuple(merge.split(" ")) for merge in self._texts("merges")]
        if any(len(pair) != 2 for pair in pairs):
            raise _fail("merges", "must be pairs of tokens")
        return [(left, right) for left, right in pairs]

    @property
    def scores(self) -> list[float]:
        """Score of each token. Raises ConfigError."""
        scores = self.metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(self.tokens):
            raise _fail("scores", "must have an entry for each token")
        return scores

    def _texts(self, key: str) -> list[str]:
        """Return a list of texts, not empty. Raises ConfigError."""
        found = self.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
            raise _fail(key, "must be a list of texts")
        return found


def tokenizer_files(metadata: Mapping[str, Any], *, prefixed: bool = False) -> dict[str, str]:
    """Return names and contents of tokenizer.json, tokenizer_config.json and possibly chat_template.jinja.

    ``prefixed``: the caller writes SentencePiece's leading space, so the tokenizer adds none. The decoder
    still drops the space. Raises ConfigError for an unsupported tokenizer.
    """
    vocabulary = GgufVocabulary(metadata, prefixed)
    kind = metadata.get("tokenizer.ggml.model")
    make = {"gpt2": _byte_level, "llama": _sentencepiece}.get(str(kind))
    if make is None:
        raise _fail("model", f"{kind!r} is not supported; there are: gpt2, llama")
    try:
        made = make(vocabulary)
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"the GGUF file's tokenizer is inconsistent: {error}", param="tokenizer") from error
    named: dict[str, Any] = {
        role: text for key, role in _ROLES.items() if (text := vocabulary.token(key)) is not None
    }
    if metadata.get("tokenizer.ggml.pre") == "kimi-k2" and kind == "gpt2":
        named[SEGMENTATION] = KIMI_LIMITS
    files = {"tokenizer.json": made}
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        # A file may have a second template, for tools.
        if isinstance(tools := metadata.get(f"tokenizer.chat_template.{_TOOLS}"), str):
            both = {"default": template, _TOOLS: tools}
            named["chat_template"] = [{"name": name, "template": text} for name, text in both.items()]
        else:
            files["chat_template.jinja"] = template
    files["tokenizer_config.json"] = json.dumps(named, ensure_ascii=False)
    return files


def _byte_level(vocabulary: GgufVocabulary) -> str:
    """Return tokenizer.json for a vocabulary of bytes with merges.

    Raises ConfigError for an unknown rule for words.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    rule = vocabulary.metadata.get("tokenizer.ggml.pre", "default")
    if rule not in WORDS:
        raise _fail("pre", f"{rule!r} is not supported; there are: {', '.join(WORDS)}")
    model = models.BPE(vocabulary.ids, vocabulary.merges, ignore_merges=rule in _WHOLE_WORDS)
    tokenizer = Tokenizer(model)
    if rule in NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    cuts: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True)
        if pattern == DIGITS
        else pre_tokenizers.Split(Regex(pattern), "isolated")
        for pattern in WORDS[rule]
    ]
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    return _serialized(tokenizer, vocabulary, begins=False)


def _sentencepiece(vocabulary: GgufVocabulary) -> str:
    """Return tokenizer.json for a SentencePiece vocabulary. Raises ConfigError."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    model = models.BPE(
        vocabulary.ids,
        merges_by_score(vocabulary.tokens, vocabulary.scores, vocabulary.kinds),
        unk_token=vocabulary.token("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = vocabulary.flag("add_space_prefix", True)
    written = prefix and not vocabulary.prefixed
    replaced: list[Any] = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE)] * written + replaced)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    # User-defined pieces contain the vocabulary's space symbol, so a search must use normalized text. A
    # normalizer with a prefix would write a prefix before such pieces, too.
    return _serialized(tokenizer, vocabulary, begins=True, normalized=not written)


def merges_by_score(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Return the pairs that make a token, in descending order of the token's score.

    SentencePiece merges the neighbours with the best joint token first.
    """
    plain = {t for t, kind in zip(tokens, kinds, strict=True) if kind in (_NORMAL, _USER)}
    found: list[tuple[float, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if token in plain:
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in plain and right in plain:
                    found.append((-score, len(found), left, right))
    return [(left, right) for _, _, left, right in sorted(found)]


def _serialized(tokenizer: Any, vocabulary: GgufVocabulary, *, begins: bool, normalized: bool = False) -> str:
    """Add special tokens, user-defined tokens, bos and eos to ``tokenizer``, and return the JSON.

    ``begins``: True if bos is the default; the file may override. ``normalized``: search user-defined tokens
    in normalized text.
    """
    from tokenizers import AddedToken, processors

    for text, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        elif kind == _USER:
            tokenizer.add_tokens([AddedToken(text, normalized=normalized, special=False)])
    # The file's add_bos_token and add_eos_token override the defaults.
    bos_eos = [
        vocabulary.token(role) if vocabulary.flag(f"add_{role}_token", wanted) else None
        for role, wanted in (("bos", begins), ("eos", False))
    ]
    first, last = bos_eos
    if first or last:
        single = " ".join([*([f"{first}:0"] if first else []), "$A:0", *([f"{last}:0"] if last else [])])
        names = [(text, vocabulary.ids[text]) for text in dict.fromkeys(bos_eos) if text]
        tokenizer.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=False), _template(processors, single, names)]
        )
    made: str = tokenizer.to_str(pretty=False)
    return made


def _template(processors: Any, single: str, names: list[tuple[str, int]]) -> Any:
    return processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=names)


def _fail(key: str, why: str) -> ConfigError:
    return ConfigError(f"the GGUF file's tokenizer.ggml.{key} {why}", param="tokenizer")
