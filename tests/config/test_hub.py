"""Model names resolve to folders: bundled models, local folders, a local hub cache. No network is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.slowness import deadline
from weft.common.errors import ConfigError
from weft.config import hub

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _cache(folder: Path, name: str = "tiny-org/tiny-model", ref: str = "main") -> Path:
    """Write a cache in the layout of the hub client. Return its only snapshot."""
    repository = folder / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / ref).write_text(_COMMIT)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "aa").write_text("{}")
    (snapshot / "config.json").symlink_to(Path("../../blobs/aa"))
    return snapshot


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_bundled_models_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spool-text").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.resolve_model_path("spool-text") == hub.bundled_models()["spool-text"]
    assert Path(hub.resolve_model_path("./spool-text")).resolve() == tmp_path / "spool-text"
    with pytest.raises(ConfigError, match="no revisions"):
        hub.resolve_model_path("spool-text", "main")


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert hub.resolve_model_path(str(tmp_path)) == str(tmp_path)


def test_names_that_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'spool-text'"):
        hub.resolve_model_path("spool-txt")
    for name in (str(tmp_path / "none"), "./none", "a/b/c", "", "~nobody-here/model"):
        with pytest.raises(ConfigError, match="there is no folder"):
            hub.resolve_model_path(name)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file: give the folder"):
        hub.resolve_model_path(str(tmp_path / "model.safetensors"))
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        hub.resolve_model_path("x" * 5000)
    assert hub.is_local("x" * 5000)


def test_a_repository_of_the_cache_is_its_snapshot(tmp_path: Path) -> None:
    """Users name or mount the folder of the repository, which has links below ``snapshots``."""
    snapshot = _cache(tmp_path)
    repository = snapshot.parents[1]
    assert Path(hub.resolve_model_path(str(repository))) == snapshot
    other = snapshot.parent / "other"
    other.mkdir()
    assert Path(hub.resolve_model_path(str(repository))) == snapshot  # refs/main decides
    (repository / "refs" / "main").unlink()
    with pytest.raises(ConfigError, match="with 2 snapshots: name one of the folders"):
        hub.resolve_model_path(str(repository))


@pytest.mark.usefixtures("_offline")
def test_hub_name_from_the_local_cache(tmp_path: Path) -> None:
    snapshot = _cache(tmp_path)
    for revision in (None, "main", _COMMIT):
        found = hub.resolve_model_path("tiny-org/tiny-model", revision, cache_dir=str(tmp_path))
        assert Path(found) == snapshot
    assert hub.cached_models(str(tmp_path)) == ["tiny-org/tiny-model"]
    (snapshot / "tokenizer.json").symlink_to(Path("../../blobs/bb"))  # as after a cleanup of blobs
    with pytest.raises(ConfigError, match=r"tokenizer.json of the model is a link to .*blobs/bb"):
        hub.resolve_model_path("tiny-org/tiny-model", cache_dir=str(tmp_path))


@pytest.mark.usefixtures("_offline")
def test_an_architecture_that_is_not_served_is_refused_before_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = _cache(tmp_path)
    fetched: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str], **more: object) -> str:
        fetched.append(allow_patterns)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = snapshot / "config.json"
    config.unlink()
    config.write_text('{"architectures": ["NobodysForCausalLM"]}')
    with pytest.raises(ConfigError, match="no architecture called 'NobodysForCausalLM'"):
        hub.resolve_model_path("tiny-org/tiny-model")
    assert [pattern for patterns in fetched for pattern in patterns if "safetensors" in pattern] == []
    config.write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert hub.resolve_model_path("tiny-org/tiny-model") == str(snapshot)
    assert "*.safetensors" in fetched[-1]


def test_what_the_cache_lacks(tmp_path: Path) -> None:
    _cache(tmp_path)
    with pytest.raises(
        ConfigError, match=r"other at revision v2 is not in the local cache and HF_HUB_OFFLINE"
    ):
        hub.resolve_model_path("tiny-org/other", "v2", cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="v9"):
        hub.resolve_model_path("tiny-org/tiny-model", "v9", cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="neither a folder nor a valid hub name"):
        hub.resolve_model_path("tiny--org/x..y", cache_dir=str(tmp_path))
    assert hub.cached_models(str(tmp_path / "none")) == []


def test_the_clients_own_cache_and_no_torch(tmp_path: Path) -> None:
    """The cache comes from the environment, in a separate process; neither module imports torch."""
    snapshot = _cache(tmp_path)
    code = (
        "import sys; from weft.config import hub, families;"
        "print(hub.resolve_model_path('tiny-org/tiny-model')); assert 'torch' not in sys.modules"
    )
    made = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=deadline(120),
    )
    assert Path(made.stdout.strip()) == snapshot
