"""Invalid headers of GGUF files are refused quickly, in little memory, with the file's name."""

from __future__ import annotations

import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import transformers

from tests.support.gguf_files import some_texts, write_model
from tests.support.slowness import deadline
from weft.common.errors import ConfigError
from weft.config.hub import resolve_model_path, resolve_tokenizer_path
from weft.gguf import header
from weft.gguf.container import Container
from weft.gguf.header import read_header

HUGE = 1 << 40
U8, U32, STRING, ARRAY = 0, 4, 8, 9
F32, Q8_1 = 0, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: list[int], kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_of(pairs: list[bytes], tensors: list[bytes], data: int = 0, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    body = head + b"".join(pairs) + b"".join(tensors)
    return body + bytes(-len(body) % 32 + data)


NAMED = pair(b"general.architecture", STRING, text(b"llama"))

#: name -> (file, expected error).
LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not begin with the letters GGUF"),
    "another format": (b"PK\x03\x04" + bytes(60), "does not begin with the letters GGUF"),
    "only the letters": (b"GGUF", "the version takes 4 bytes at byte 4, and the file has 0 more bytes"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (file_of([], [], version=1), "version 1 of the format is not supported"),
    "a list of 2^40 entries in 49 bytes": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair(b"k", ARRAY, struct.pack("<IQ", U8, HUGE)),
        "claims 1099511627776 entries of 'k', and has 0 more",
    ),
    "a list of 2^40 texts": (
        file_of([pair(b"k", ARRAY, struct.pack("<IQ", STRING, HUGE))], []),
        "claims 1099511627776 entries of 'k'",
    ),
    "a list of numbers longer than the file": (
        file_of([pair(b"k", ARRAY, struct.pack("<IQ", U32, 9) + bytes(8))], []),
        "claims 9 entries of 'k'",
    ),
    "lists in lists": (
        file_of([pair(b"k", ARRAY, struct.pack("<IQIQ", ARRAY, 1, ARRAY, 1) * 3)], []),
        "'k' is a list of lists",
    ),
    "2^64 - 1 keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, (1 << 64) - 1), "18446744073709551615 keys"),
    "2^64 - 1 tensors": (
        b"GGUF" + struct.pack("<IQQ", 3, (1 << 64) - 1, 0) + bytes(64),
        "18446744073709551615 tensors",
    ),
    "a long key": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE) + bytes(32),
        "a key has 1099511627776 bytes",
    ),
    "a long text": (
        file_of([text(b"k") + struct.pack("<IQ", STRING, HUGE)], []),
        "a value takes 1099511627776 bytes",
    ),
    "an unknown type of value": (
        file_of([pair(b"k", 77, b"")], []),
        "'k' has a value of the unknown type 77",
    ),
    "alignment 0": (
        file_of([pair(b"general.alignment", U32, struct.pack("<I", 0))], []),
        "general.alignment is 0, not a power of two",
    ),
    "alignment 33": (
        file_of([pair(b"general.alignment", U32, struct.pack("<I", 33))], []),
        "general.alignment is 33, not a power of two",
    ),
    "alignment as a text": (
        file_of([pair(b"general.alignment", STRING, text(b"32"))], []),
        "general.alignment is not a number of 32 bits",
    ),
    "a tensor of many dims": (file_of([NAMED], [tensor(b"t", [1] * 9)]), "tensor 't' has 9 dims"),
    "a tensor without dims": (file_of([NAMED], [tensor(b"t", [])], 4), "tensor 't' has 0 dims"),
    "dims whose product overflows": (
        file_of([NAMED], [tensor(b"t", [1 << 32, 1 << 32])]),
        "tensor 't' has dims [4294967296, 4294967296]",
    ),
    "a dim of 0": (file_of([NAMED], [tensor(b"t", [4, 0])]), "tensor 't' has dims [4, 0]"),
    "half a block": (file_of([NAMED], [tensor(b"t", [48], kind=8)], 64), "rows of 't' have 48 numbers"),
    "a tensor behind the file": (
        file_of([NAMED], [tensor(b"t", [4], offset=HUGE)], 64),
        "is the download complete?",
    ),
    "a file that was cut": (file_of([NAMED], [tensor(b"t", [64])], 64), "'t' ends at byte"),
    "a name that is no text": (file_of([NAMED], [tensor(b"\xff", [1])], 4), "is not UTF-8"),
    "a tensor twice": (file_of([], [tensor(b"t", [1])] * 2, 4), "two tensors have the same name"),
    "a text that is none": (file_of([pair(b"k", STRING, text(b"\xff"))], []), "a value at 45 is not UTF-8"),
    "a key twice": (file_of([NAMED, NAMED], []), "the key 'general.architecture' occurs twice"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", list(LIES))
def test_a_lie_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    content, told = LIES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.monotonic()
    with pytest.raises(ConfigError) as raised:
        resolve_model_path(str(path))
    assert raised.value.message.startswith("model.gguf is damaged or not a GGUF file: ")
    assert told in raised.value.message
    assert time.monotonic() - begun < deadline(2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_lists_within_the_file_are_limited_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "_MOST_ENTRIES", 100)
    lists = [pair(b"k%d" % i, ARRAY, struct.pack("<IQ", U8, 60) + bytes(60)) for i in range(2)]
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of(lists, []))
    with pytest.raises(ConfigError, match="lists up to 'k1' have 120 entries in total; the limit is 100"):
        Container(path)
    monkeypatch.setattr(header, "_MOST_PARTS", 3)
    path.write_bytes(file_of([], [tensor(b"t%d" % i, [1]) for i in range(4)], 4))
    with pytest.raises(ConfigError, match="the file has 4 tensors and 0 keys; the limit is 3 of each"):
        Container(path)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_what_is_read_is_what_the_library_reads(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    more = {"a.flag": True, "a.numbers": [1, -2, 3], "a.floats": [0.5, 1e-3], "a.flags": [True, False]}
    write_model(path, tiny(), kind=kind, texts={**some_texts(), **more, "a.text": "\u2581é"})
    found, library = Container(path), gguf.GGUFReader(str(path))
    expected = {name: field.contents() for name, field in library.fields.items() if name[:5] != "GGUF."}
    assert found.metadata == expected
    tensors = {tensor.name: tensor for tensor in found.tensors()}
    assert tensors.keys() == {tensor.name for tensor in library.tensors}
    for other in library.tensors:
        one = tensors[other.name]
        assert (one.kind, one.offset) == (other.tensor_type.name, other.data_offset)
        assert (one.shape, one.dims) == (tuple(reversed(other.shape.tolist())), other.data.shape)
        assert one.data.dtype == other.data.dtype
        np.testing.assert_array_equal(one.data, other.data)


def test_every_cut_of_a_right_file_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "model.gguf"
    write_model(whole, tiny())
    content = whole.read_bytes()
    data = read_header(whole).data
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, data, 211), data, (data + len(content)) // 2, len(content) - 40]:
        cut.write_bytes(content[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf is damaged"):
            Container(cut)


def tiny() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def _patched(path: Path, name: bytes, kind: int) -> None:
    """Writes another type into the entry of tensor ``name``."""
    content = bytearray(path.read_bytes())
    at = content.index(text(name)) + len(text(name))
    (dims,) = struct.unpack_from("<I", content, at)
    struct.pack_into("<I", content, at + 4 + 8 * dims, kind)
    path.write_bytes(content)


@pytest.mark.parametrize(("kind", "shown"), [(Q8_1, "Q8_1"), (99, "number 99"), (26, "I32")])
def test_types_that_are_not_read_are_told_each_time(kind: int, shown: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, tiny())
    _patched(path, b"blk.0.attn_q.weight", kind)
    for _ in range(2):
        with pytest.raises(ConfigError) as raised:
            resolve_model_path(str(path))
        message = raised.value.message
        assert message.startswith(f"model.gguf has a tensor of the GGUF type {shown}, which is not supported")
        assert "blk.0.attn_q.weight" in message
        assert "Q4_K_M" in message
        assert "llama-quantize" in message


def _texts(**changes: object) -> Callable[[Path], None]:
    return lambda path: write_model(path, tiny(), texts={**some_texts(), **changes})


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (_texts(pre="unheard-of"), "'unheard-of' is not supported; there are: gpt-2"),
        (_texts(model="bert"), "'bert' is not supported; there are: gpt2, llama"),
        (_texts(merges=["a b c"]), "merges must be pairs"),
    ],
)
def test_a_tokenizer_that_is_not_read_is_told_each_time(
    write: Callable[[Path], None], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.gguf"
    write(path)
    for _ in range(2):
        folder = resolve_model_path(str(path))
        with pytest.raises(ConfigError) as raised:
            resolve_tokenizer_path(None, folder)
        assert raised.value.message.startswith("the tokenizer in model.gguf cannot be used: ")
        assert told in raised.value.message
        assert "--tokenizer FOLDER" in raised.value.message
        with pytest.raises(ConfigError, match="cannot be used"):
            resolve_tokenizer_path(str(path), "elsewhere")
    assert resolve_tokenizer_path("spool-text", folder).endswith("spool-text")
    assert not caplog.records


def test_a_tensor_that_no_served_model_has_is_told_before_an_engine_starts(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, tiny())
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"))
    with pytest.raises(
        ConfigError, match=r"^model\.gguf: the GGUF file has a tensor 'blk\.0\.attn_x\.weight'"
    ):
        resolve_model_path(str(path))


def test_a_git_lfs_pointer_is_told(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4683073952\n")
    with pytest.raises(ConfigError, match=r"model\.gguf is a Git LFS pointer.*git lfs pull"):
        resolve_model_path(str(path))
