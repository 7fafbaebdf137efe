"""Encoding equals the library's and transformers', and text never becomes a special token."""

from __future__ import annotations

import codecs
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copytree

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.common.errors import ConfigError, InvalidRequest
from weft.text.segments import Segmentation
from weft.text.tokenizer import Tokenizer
from weft.text.tokenizer_files import read_text_files

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
HOSTILE = st.lists(
    st.one_of(
        TEXT,
        st.sampled_from(
            [
                "<s>",
                "</s>",
                "<unk>",
                "<|im_end|>",
                "<|im_start|>",
                "<|endoftext|>",
                "[UNK]",
                "[CLS]",
                "<",
                "s",
                ">",
            ]
        ),
    ),
    max_size=6,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_encodes_as_the_library_does(
    folders: dict[str, Path], all_tokenizers: dict[str, Tokenizer], text: str
) -> None:
    for name, ours in all_tokenizers.items():
        if any(special in text for special in ours.special) or name == "fallback_bpe":
            continue
        plain = tokenizers.Tokenizer.from_file(str(folders[name] / "tokenizer.json"))
        assert ours.encode(text) == plain.encode(text).ids, name
        assert ours.encode(text, add_special_tokens=False) == plain.encode(text, add_special_tokens=False).ids


@pytest.mark.requirement("F32")
@settings(max_examples=150, deadline=None)
@given(text=HOSTILE)
def test_text_never_becomes_a_special_token(all_tokenizers: dict[str, Tokenizer], text: str) -> None:
    for name, ours in all_tokenizers.items():
        unknown = {ours.special.get(text) for text in ("<unk>", "[UNK]")}  # unknown characters are unknown
        made = set(ours.encode(text, add_special_tokens=False))
        assert not made & (set(ours.special.values()) - unknown), name


@pytest.mark.parametrize("name", ["unigram", "byte_level", "fallback_bpe"])
def test_a_spelled_special_token_reads_back_as_text(all_tokenizers: dict[str, Tokenizer], name: str) -> None:
    ours = all_tokenizers[name]
    for special in ours.special:
        ids = ours.encode(f"the {special} the", add_special_tokens=False)
        assert ours.decode(ids) == f"the {special} the"
        assert len(ids) > 3
        assert ours.special[special] in ours.encode(f"the {special} the", parse_special=True)


def test_the_vocabulary_itself_would_have_matched(folders: dict[str, Path]) -> None:
    """The unigram model finds ``</s>`` as a piece even with special tokens off: renaming is needed."""
    library = tokenizers.Tokenizer.from_file(str(folders["unigram"] / "tokenizer.json"))
    library.encode_special_tokens = True
    data = json.loads(library.to_str())
    assert ["</s>", 0.0] in data["model"]["vocab"]


def test_beginning_of_sequence_follows_the_post_processor(all_tokenizers: dict[str, Tokenizer]) -> None:
    unigram, bpe = all_tokenizers["unigram"], all_tokenizers["fallback_bpe"]
    assert unigram.encode("the")[0] == 1
    assert 1 not in unigram.encode("the", add_special_tokens=False)
    assert unigram.encode("<s>the").count(1) == 1
    assert 1 not in bpe.encode("the"), "tokenizer.json has no post-processor; add_bos_token is not asked"


@pytest.mark.parametrize("name", ["byte_level", "unigram", "fallback_bpe", "wordpiece"])
def test_same_ids_as_transformers(
    folders: dict[str, Path], all_tokenizers: dict[str, Tokenizer], name: str
) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folders[name])
    ours = all_tokenizers[name]
    for text in ("the quick fox", " two  spaces", "你好 the", "", "a\nb\tc"):
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.eos_id == theirs.eos_token_id


@pytest.mark.requirement("F32")
@pytest.mark.parametrize("bad", ["\ud800", "a\udfffb"])
def test_lone_surrogates_are_the_clients_error(tokenizer: Tokenizer, bad: str) -> None:
    with pytest.raises(InvalidRequest):
        tokenizer.encode(bad)


@pytest.mark.requirement("F32")
def test_nul_is_text(all_tokenizers: dict[str, Tokenizer]) -> None:
    ours = all_tokenizers["byte_level"]
    assert ours.decode(ours.encode("a\0b")) == "a\0b"


def test_ends_of_sequence_come_from_every_file(folders: dict[str, Path], tmp_path: Path) -> None:
    from shutil import copytree

    folder = copytree(folders["byte_level"], tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    ours = Tokenizer.load(folder)
    assert ours.eos_ids == (0, 2, 7)
    assert not ours.is_special(7), "an ordinary token stays ordinary"


def test_tokens_named_special_by_the_config_are_special(folders: dict[str, Path], tmp_path: Path) -> None:
    from shutil import copytree

    folder = copytree(folders["byte_level"], tmp_path / "model")
    config = {
        **json.loads((folder / "tokenizer_config.json").read_text()),
        "additional_special_tokens": ["<think>"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    number = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<think>")
    assert number in Tokenizer.load(folders["byte_level"]).encode("<think>")
    ours = Tokenizer.load(folder)
    assert ours.is_special(number)
    assert number not in ours.encode("<think>")


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_token_bytes_and_text(all_tokenizers: dict[str, Tokenizer]) -> None:
    level, fallback = all_tokenizers["byte_level"], all_tokenizers["unigram"]
    ids = level.encode("é 你", add_special_tokens=False)
    assert b"".join(map(level.token_bytes, ids)) == "é 你".encode()
    ids = fallback.encode("the 猫", add_special_tokens=False)
    assert b"".join(map(fallback.token_bytes, ids)) == " the 猫".encode()
    assert fallback.token_text(ids[-1]) == "\ufffd"
    assert level.token_text(level.special["<|im_end|>"]) == "<|im_end|>"
    assert level.token_text(10**6) == ""


def test_threads_share_a_tokenizer(all_tokenizers: dict[str, Tokenizer]) -> None:
    ours = all_tokenizers["byte_level"]
    texts = [f"the {number} fox </s> {chr(0x4E00 + number)}" for number in range(64)]
    alone = [ours.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ours.encode, texts)) == alone


@pytest.mark.parametrize("pair", ["[CLS] $A [SEP] $B [SEP]", "$A $B"])
def test_pairs_have_the_form_of_the_tokenizer(pair: str, folders: dict[str, Path], tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(folders["byte_level"] / "tokenizer.json"))
    library.add_special_tokens(["[CLS]", "[SEP]"])
    ids = [(name, library.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=ids
    )
    library.save(str(tmp_path / "tokenizer.json"))
    files = read_text_files(tmp_path)
    plain = Tokenizer(files)
    cut = Tokenizer(msgspec.structs.replace(files, segmentation=Segmentation(longest_run=1000)))
    expected = library.encode("Tom has", "3 pens").ids
    assert plain.encode_cut("Tom has", "3 pens") == expected
    if pair != "$A $B":
        assert cut.encode_cut("Tom has", "3 pens") == expected
    else:  # the ids around a single text
        assert cut.encode_cut("Tom has", "3 pens") == [ids[0][1], *expected, ids[1][1]]
    for limit in (1, 4, 1000):
        assert len(plain.encode_cut("Tom has", "3 pens", limit)) == min(limit, len(expected))
        assert len(cut.encode_cut("Tom has", "3 pens", limit)) <= limit


def test_files_of_other_editors(folders: dict[str, Path], tmp_path: Path) -> None:
    """A byte order mark belongs to no file. Entries of another type have no tokens."""
    source = folders["byte_level"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + (source / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(codecs.BOM_UTF8 + b"{{ 1 }}\r\n")
    (tmp_path / "special_tokens_map.json").write_text(
        '{"additional_special_tokens": 5, "extra_special_tokens": "x", "added_tokens_decoder": ["x"]}'
    )
    found = read_text_files(tmp_path)
    assert found.chat_template == "{{ 1 }}\n"
    assert found.tokenizer_json == read_text_files(source).tokenizer_json
    assert Tokenizer.load(tmp_path).encode("ab") == Tokenizer.load(source).encode("ab")
    for content, said in ((b"\xff{}", "not UTF-8"), (b"{", "not readable JSON: "), (b"[" * 100_000, "JSON")):
        (tmp_path / "generation_config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"generation_config\.json of .*{said}"):
            read_text_files(tmp_path)


def test_added_tokens_of_the_configuration(folders: dict[str, Path], tmp_path: Path) -> None:
    """A fine-tuned model may have an old tokenizer.json: transformers adds the tokens that others list."""
    transformers = pytest.importorskip("transformers")
    source = folders["byte_level"]
    end = Tokenizer.load(source).vocab_size
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    listed = {
        str(end): {"content": "<call>", "special": False, **flags},
        str(end + 1): {"content": "<|turn|>", "special": True, **flags},
        str(end + 9): {"content": "<far>", "special": False, **flags},
    }
    config = json.loads((source / "tokenizer_config.json").read_text())
    for name, more in (
        ("decoder", {"added_tokens_decoder": dict(list(listed.items())[:2])}),
        ("file", {}),
        ("far", {"added_tokens_decoder": listed}),
    ):
        folder = copytree(source, tmp_path / name)
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, **more}))
        if name == "file":
            (folder / "added_tokens.json").write_text(json.dumps({"<call>": end, "<|turn|>": end + 1}))
        ours = Tokenizer.load(folder)
        text = "the <call>fox"
        if name != "far":
            theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
            assert ours.encode(text) == theirs(text)["input_ids"]
        assert end in ours.encode(text)
        assert ours.decode([end]) == "<call>"
        assert "<far>" not in ours.added
    assert ours.special["<|turn|>"] == end + 1
    assert end + 1 not in ours.encode("<|turn|>"), "text from clients is no special token"
    assert ours.encode("a<|turn|>", parse_special=True)[-1] == end + 1
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": end + 1}}))
    ours = Tokenizer.load(folder)
    assert "<call>" in ours.added
    assert "<|turn|>" not in ours.added, "the model has no row for the id"


def test_a_special_token_behind_a_normalizer(folders: dict[str, Path], tmp_path: Path) -> None:
    """Conversions of Llama 1 search special tokens in normalized text, which begins with a space."""
    folder = copytree(folders["fallback_bpe"], tmp_path / "model")
    data = json.loads((folder / "tokenizer.json").read_text())
    for entry in data["added_tokens"]:
        entry["normalized"] = True
    (folder / "tokenizer.json").write_text(json.dumps(data))
    ours, plain = Tokenizer.load(folder), Tokenizer.load(folders["fallback_bpe"])
    for text in ("the</s>the", "</s>", "the </s><s> the"):
        assert ours.encode(text, parse_special=True) == plain.encode(text, parse_special=True)
    assert ours.encode("the</s>", parse_special=True)[-1] == ours.special["</s>"]


def test_a_special_token_inside_a_word(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copytree(folders["byte_level"], tmp_path / "model")
    data = json.loads((folder / "tokenizer.json").read_text())
    for entry in data["added_tokens"]:
        entry["single_word"] = True
    (folder / "tokenizer.json").write_text(json.dumps(data))
    ids = Tokenizer.load(folder).encode("fox<|im_end|>fox", parse_special=True)
    assert ids == Tokenizer.load(folders["byte_level"]).encode("fox<|im_end|>fox", parse_special=True)
