"""Word rules of GGUF files give the ids of Hugging Face's tokenizers and of plain algorithms."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from tokenizers import Regex, pre_tokenizers
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from tests.support.gguf_files import texts_of
from tests.support.vocabularies import KIMI, TEKKEN, Plain, fuzzed, kimi_cuts, trained
from weft.config.hub import bundled_models
from weft.gguf.gguf_tokenizer import NORMALIZED, WORDS, tokenizer_files
from weft.text.tokenizer import Tokenizer
from weft.text.vocabularies.byte_level import tokenizer_json

#: The texts of test_llama_cpp.py, which runs only with another package.
TEXTS = [
    "We'll pay 12345.67 dollars, DON'T we?",
    "fooBar's HTTPServer\n\n\n  x = 'y'\t\tz\r\n",
    "Gr\u00fc\u00dfe \u4e16\u754c \U0001f600\U0001f600 na\u00efve caf\u00e9",
    "   leading, trailing   ",
    "a\u0300\u00a0b\u3000c\u200bd",
]
SPOOL = Path(bundled_models()["spool-text"])


def built(texts: dict[str, Any]) -> tokenizers.Tokenizer:
    files = tokenizer_files({f"tokenizer.ggml.{key}": value for key, value in texts.items()})
    return tokenizers.Tokenizer.from_str(files["tokenizer.json"])


def ids(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def drawn(pre: str) -> list[str]:
    """Return texts; of a normalized form for rules with a normalizer, which Hugging Face's reader lacks."""
    texts = [*TEXTS, *fuzzed(600)]
    return [unicodedata.normalize("NFC", text) for text in texts] if pre in NORMALIZED else texts


HUGGING_FACE = ("llama-bpe", "falcon3", "pixtral", "qwen2", "qwen35", "deepseek-r1-qwen", "gpt-4o", "tekken")


@pytest.mark.parametrize("pre", HUGGING_FACE)
def test_ids_are_those_of_hugging_faces_reader(pre: str) -> None:
    huggingface = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    texts = texts_of(SPOOL, pre)
    given = {**texts, "tokenizer_type": "gpt2", "pre_tokenizer_type": pre}
    theirs, _ = huggingface.convert_gguf_tokenizer("llama", given)
    assert ids(built(texts), drawn(pre)) == ids(theirs, drawn(pre))


def test_ids_of_qwen35_are_those_of_its_class() -> None:
    texts = texts_of(SPOOL, "qwen35")
    vocabulary = {token: number for number, token in enumerate(texts["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in texts["merges"]]
    theirs = Qwen3_5Tokenizer(vocab=vocabulary, merges=merges).backend_tokenizer
    wanted = [*TEXTS, *fuzzed(600)]  # not normalized
    assert ids(built(texts), wanted) == ids(theirs, wanted)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


#: Pre-tokenizers as the tokenizer.json of the models has them.
PUBLISHED = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)],
    "deepseek-v3": [
        _split(r"\p{N}{1,3}"),
        _split(r"[一-龥぀-ゟ゠-ヿ]+"),
        _split(
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ],
}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_words_are_those_of_the_published_file(pre: str) -> None:
    theirs = pre_tokenizers.Sequence(PUBLISHED[pre])
    ours = built(texts_of(SPOOL, pre)).pre_tokenizer
    for text in drawn(pre):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's 12345\n\n", ["It", "'", "s", " ", "1", "2", "3", "4", "5", "\n", "\n"]),
        # The published range of symbols, ":-~", has the letters of ASCII.
        ("Grüße, 世界!", ["Gr", "üß", "e", ",", " ", "世界", "!"]),
        ("a  b \t", ["a", " ", " b", " \t"]),
        ("\u1f7d\u03ce \ufb13 \u05d0\u05d1", ["\u1f7d", "\u03ce", " \ufb13", " \u05d0\u05d1"]),
    ],
)
def test_words_of_deepseek_llm(text: str, words: list[str]) -> None:
    found = built(texts_of(SPOOL, "deepseek-llm")).pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == words


def test_letters_of_deepseek_llm_have_cases() -> None:
    """The published list has all such letters of Latin, Greek and Cyrillic, and some of other scripts."""
    letters = regex.compile(WORDS["deepseek-llm"][1])
    for number in [*range(0x20, 0xD800), *range(0xE000, 0x1F000)]:
        found = letters.fullmatch(chr(number)) is not None
        cased = unicodedata.category(chr(number)) in ("Lu", "Ll", "Lt")
        whole = number < 0x530 or 0x1E00 <= number < 0x2000
        assert found == cased or (cased and not whole), hex(number)


@pytest.mark.parametrize(("pre", "pattern"), [("tekken", TEKKEN), ("kimi-k2", KIMI)])
def test_ids_are_those_of_the_plain_algorithm(pre: str, pattern: str, tmp_path: Path) -> None:
    tokens = trained(pattern)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json("test", tokens, [], pattern))
    plain = Plain(tokens, pattern)
    wanted = [*TEXTS, *fuzzed(600)]
    assert ids(built(texts_of(tmp_path, pre)), wanted) == [plain.encode(text) for text in wanted]


def test_kimis_cuts(tmp_path: Path) -> None:
    """Long runs are cut before the rule, as by Kimi's own tokenizer."""
    tokens = trained(KIMI)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json("test", tokens, [], KIMI))
    texts = texts_of(tmp_path, "kimi-k2")
    files = tokenizer_files({f"tokenizer.ggml.{key}": value for key, value in texts.items()})
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    plain = Plain(tokens, KIMI)
    long = "1a" * 12_499 + "1abc" + " the of" * 20  # the cut is between b and c, within a word
    expected = [number for part in kimi_cuts(long) for number in plain.encode(part)]
    assert expected != plain.encode(long)
    assert Tokenizer.load(tmp_path).encode(long, add_special_tokens=False) == expected
    assert "weft_segmentation" not in json.loads(
        tokenizer_files({f"tokenizer.ggml.{k}": v for k, v in texts_of(SPOOL, "gpt-2").items()})[
            "tokenizer_config.json"
        ]
    )
