"""Which file of a folder is the vocabulary, what is said where none is, and how conversions are kept."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.text_folders import TEMPLATE
from tests.support.vocabularies import (
    KIMI,
    TEKKEN,
    folder,
    kimi_config,
    kimi_folder,
    pieces,
    sentencepiece_file,
    tekken_file,
    tiktoken_file,
    trained,
)
from weft.common.errors import ConfigError
from weft.text.tokenizer import Tokenizer
from weft.text.tokenizer_files import read_text_files
from weft.text.vocabularies import tiktoken

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 4\n" % 7
SIZES = {
    "tekken.json": len(trained(TEKKEN)) + 40,
    "tiktoken.model": len(trained(KIMI)) + 256,
    "tokenizer.model": len(pieces()),
}


def every(path: Path) -> Path:
    """A folder with one of each, but no tokenizer.json."""
    return folder(
        path,
        tekken__json=tekken_file(trained(TEKKEN)),
        tiktoken__model=tiktoken_file(trained(KIMI)),
        tokenizer__model=sentencepiece_file(pieces()),
        tokenizer_config__json=kimi_config(trained(KIMI)) | {"added_tokens_decoder": {}},
    )


def test_files_are_looked_for_in_order(tmp_path: Path) -> None:
    path = every(tmp_path / "x")
    for name in ("tekken.json", "tiktoken.model", "tokenizer.model"):
        assert Tokenizer.load(path).vocab_size == SIZES[name]
        (path / name).unlink()
    with pytest.raises(
        ConfigError, match=r"none of tokenizer\.json, tekken\.json, tiktoken\.model, tokenizer\.model"
    ):
        Tokenizer.load(path)


def test_a_tokenizer_json_with_wrong_ids_is_not_kimis(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = kimi_folder(tmp_path / "x")
    data = json.loads(read_text_files(path).tokenizer_json)
    file = path / "tokenizer.json"
    file.write_text(json.dumps(data))
    assert Tokenizer.load(path).special["[PAD]"] == SIZES["tiktoken.model"] - 1
    assert not caplog.records
    named = [entry for entry in data["added_tokens"] if "reserved" not in entry["content"]]
    for number, entry in enumerate(named):  # one after the other, as converters write them
        entry["id"] = data["model"]["vocab"][entry["content"]] = len(trained(KIMI)) + number
    data["added_tokens"] = named
    file.write_text(json.dumps(data))
    assert Tokenizer.load(path).special["[PAD]"] == SIZES["tiktoken.model"] - 1
    assert "the id of its special token" in caplog.text
    (path / "tokenizer_config.json").unlink()  # nothing says how the original cuts words
    assert Tokenizer.load(path).special["[PAD]"] == len(trained(KIMI)) + len(named) - 1


@pytest.mark.parametrize(
    "name",
    [
        "tekken.json",
        "tiktoken.model",
        "tokenizer.model",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "added_tokens.json",
        "chat_template.jinja",
    ],
)
def test_pointers_in_their_place_are_named(tmp_path: Path, name: str) -> None:
    path = every(tmp_path / "x")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    for other in SIZES:
        if other != {"added_tokens.json": "tokenizer.model"}.get(name, name if name in SIZES else other):
            (path / other).unlink()
    (path / name).write_bytes(POINTER)
    with pytest.raises(ConfigError, match=f"{name} is a Git LFS pointer.*git lfs pull"):
        Tokenizer.load(path)


def test_a_vocabulary_is_converted_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Tokenizer.load(kimi_folder(tmp_path / "x"))
    (made,) = cache.iterdir()
    calls: list[bytes] = []
    convert = tiktoken.convert
    monkeypatch.setattr(
        tiktoken, "convert", lambda source, config: calls.append(source) or convert(source, config)
    )
    again = Tokenizer.load(kimi_folder(tmp_path / "elsewhere"))
    assert not calls
    assert again.files == first.files
    made.write_bytes(made.read_bytes()[:1000])
    assert Tokenizer.load(tmp_path / "x").files == first.files
    assert len(calls) == 1, "half a file is not used"
    kimi_folder(tmp_path / "x", added_tokens_decoder={})
    assert "[BOS]" not in Tokenizer.load(tmp_path / "x").special
    assert len(calls) == 2, "other names are another vocabulary"


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.parent.write_text("no folder")
    assert Tokenizer.load(kimi_folder(tmp_path / "x")).encode("eBay")
    assert "XDG_CACHE_HOME" in caplog.text


def test_conversions_at_the_same_time_leave_one_whole_file(tmp_path: Path, cache: Path) -> None:
    path = kimi_folder(tmp_path / "x")
    with ThreadPoolExecutor(4) as pool:
        files = list(pool.map(read_text_files, [path] * 4))
    assert all(one == files[0] for one in files)
    assert len(list(cache.iterdir())) == 1
