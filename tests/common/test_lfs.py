"""Git LFS pointers are recognized in place of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.common.errors import ConfigError
from weft.common.lfs import (
    is_pointer,
    read_model_file,
    read_model_text,
    refuse_broken_links,
    refuse_pointer,
)

OID = "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
POINTERS = {
    "today": f"version https://git-lfs.github.com/spec/v1\n{OID}",
    "oldest": f"version https://hawser.github.com/spec/v1\n{OID}",
    "extended": f"version https://git-lfs.github.com/spec/v1\next-0-foo {OID}{OID}",
    "carriage returns": f"version https://git-lfs.github.com/spec/v1\r\n{OID}",
}
FILES = {
    "empty": "",
    "json": '{"version": "https://git-lfs.github.com/spec/v1"}',
    "a long file that begins like a pointer": POINTERS["today"] + "x" * 2000,
}


@pytest.mark.parametrize("name", POINTERS)
def test_pointers_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text(POINTERS[name], newline="")
    assert is_pointer(path)
    with pytest.raises(ConfigError, match=r"model\.safetensors is a Git LFS pointer.*git lfs pull") as caught:
        refuse_pointer(path, "--model")
    assert caught.value.param == "--model"


@pytest.mark.parametrize("name", FILES)
def test_other_files_are_no_pointers(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    path.write_text(FILES[name])
    assert not is_pointer(path)
    refuse_pointer(path)


def test_missing_files_and_folders_are_no_pointers(tmp_path: Path) -> None:
    assert not is_pointer(tmp_path / "absent")
    assert not is_pointer(tmp_path)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    for read in (read_model_file, read_model_text):
        with pytest.raises(ConfigError, match=r"tokenizer\.json of the model cannot be read: No such file"):
            read(tmp_path / "tokenizer.json")
        (tmp_path / "pointer").write_text(POINTERS["today"])
        with pytest.raises(ConfigError, match="Git LFS pointer"):
            read(tmp_path / "pointer")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "chat_template.jinja",
        "tokenizer.model",
        "merges.txt",
        "additional_chat_templates/tool_use.jinja",
        "1_Pooling/config.json",
    ],
)
def test_links_to_missing_files_are_named(tmp_path: Path, name: str) -> None:
    """A copy of a snapshot folder of the hub's cache without the folder blobs has such links only."""
    (tmp_path / "README.md").symlink_to("../../blobs/0a")  # no file of the model
    (tmp_path / "real").write_text("{}")
    (tmp_path / "generation_config.json").symlink_to("real")
    refuse_broken_links(tmp_path)
    refuse_broken_links(tmp_path / "absent")
    (tmp_path / "original").mkdir()
    (tmp_path / "original/params.json").symlink_to("../../blobs/0a")  # another format
    refuse_broken_links(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to("../../blobs/0b")
    with pytest.raises(ConfigError, match=rf"{name} .* is a link to .*blobs/0b, which does not exist"):
        refuse_broken_links(tmp_path)


def test_links_that_cannot_be_followed_are_named(tmp_path: Path) -> None:
    """As a link into a folder without permission: Path.exists raises an OSError."""
    (tmp_path / "config.json").symlink_to("x" * 1000)
    with pytest.raises(ConfigError, match=r"config.json of the model is a link to x+, which does not exist"):
        refuse_broken_links(tmp_path)
