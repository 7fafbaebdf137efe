"""Checkpoint folders made from GGUF files: small files beside a link to the weights."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import msgspec

from weft.common.errors import ConfigError
from weft.common.folder import cache_folder
from weft.common.lfs import refuse_pointer
from weft.gguf.config import config_of
from weft.gguf.container import Container, StoredTensor, shards
from weft.gguf.gguf_names import GgufNames, Published, published
from weft.gguf.gguf_tokenizer import tokenizer_files
from weft.gguf.model_facts import ModelFacts

VERSION = 8
"""Version of the folder's contents. Folders of other versions are ignored."""
_BESIDE = re.compile(r"^mmproj|[-_.]mmproj|^imatrix", re.IGNORECASE)
"""Names of files beside a model: vision towers, and statistics for quantization."""
_WEIGHTS = "weights"
_LAYOUT = "gguf.json"
_NO_TOKENIZER = "no-tokenizer.txt"
"""File with the reason why the file's tokenizer cannot be used, in place of a tokenizer."""


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file for ``path``: the file, or the only model in a folder without other weights.

    Return None for any other folder. Raises ConfigError for a missing file, and for a folder with several
    models. Publishers of GGUF files put the config.json of the original model beside the files.
    """
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"there is no file {str(path)!r}", param="--model")
        refuse_pointer(path, "--model")
        return path
    # A folder made from a file, or with weights of another format.
    others = (_LAYOUT, "*.safetensors", "*.bin")
    if (path / "config.json").is_file() and any(next(path.glob(name), None) for name in others):
        return None
    found = sorted(file for file in path.glob("*.gguf") if not _BESIDE.search(file.name))
    models = {shards(file)[0] for file in found}
    if len(models) > 1:
        names = ", ".join(sorted(file.name for file in models))
        raise ConfigError(f"{str(path)!r} has several GGUF files: name one of {names}", param="--model")
    return next(iter(models), None)


def checkpoint_folder(path: Path) -> str:
    """Return the checkpoint folder of the GGUF file ``path``, in the user's cache. Makes a missing folder.

    A changed file gets another folder. Raises ConfigError for an unsupported model.
    """
    parts = _parts(path)
    folder = cache_folder("gguf") / _key(shards(path.absolute())[0].stem, parts)
    if (folder / "config.json").is_file():
        return str(folder)
    containers = [Container(part) for part in parts]
    _check_parts(path, containers)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
        try:
            _write(made, containers)
            _publish(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"the configuration of {parts[0].name} cannot be written to {folder.parent}: "
            f"{error.strerror}; set XDG_CACHE_HOME to another folder",
            param="--model",
        ) from error
    return str(folder)


def _parts(path: Path) -> list[Path]:
    """Return all files of the model of ``path``, in order, without symbolic links.

    In the cache of the hub's client, the files are links to files with other names. The names of the links
    therefore identify the parts. Raises ConfigError if a part is missing.
    """
    named = shards(path.absolute())
    return [part.resolve() for part in named] if len(named) > 1 else shards(path.resolve())


def _check_parts(path: Path, containers: list[Container]) -> None:
    """Raise ConfigError for one of several parts if the names do not lead to the other parts."""
    count = containers[0].metadata.get("split.count", 0)
    if isinstance(count, int) and count > 1 and count != len(containers):
        raise ConfigError(
            f"{path.name} is one of {count} parts of a model, and the other parts were not found: rename the "
            f"parts to NAME-00001-of-{count:05d}.gguf and so on",
            param="--model",
        )


def _publish(made: Path, folder: Path) -> None:
    """Rename ``made`` to ``folder``, unless another process was faster. Raises OSError.

    A folder appears complete, by a rename, because other processes look for the same folder.
    """
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def check_tokenizer(folder: Path) -> None:
    """Raise ConfigError for a folder from a GGUF file with an unusable tokenizer.

    The folder exists anyway, because ``--tokenizer`` may name another tokenizer. The error is raised on every
    start with the file's own tokenizer, not only on the start that made the folder.
    """
    found = folder / _NO_TOKENIZER
    if found.is_file():
        raise ConfigError(
            f"{found.read_text(encoding='utf-8')}. Name a folder with the published tokenizer of this model: "
            "--tokenizer FOLDER",
            param="--tokenizer",
        )


def gguf_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder made from a GGUF file; empty for other folders."""
    return sorted(folder.glob(f"{_WEIGHTS}-*.gguf"))


def differing_facts(one: Path, other: Path) -> str:
    """Return the fields of ``config.json`` that differ between two folders made from GGUF files; "" if none.

    The types of the weights and the ids of special tokens are not compared. Raises OSError."""
    first, second = (json.loads((folder / "config.json").read_bytes()) for folder in (one, other))
    ignored = ("quantization_config", "dtype", "eos_token_id", "bos_token_id", "pad_token_id")
    keys = sorted((first.keys() | second.keys()) - set(ignored))
    return ", ".join(key for key in keys if first.get(key) != second.get(key))


def model_files(path: Path) -> list[Path]:
    """Return all GGUF files of the model at ``path``: a file, a folder with one model, or a folder made from
    a file. [] for a path without a GGUF file. Raises ConfigError as ``find_gguf`` and for a missing part."""
    if made := gguf_files(path):
        return made
    found = find_gguf(path)
    return [] if found is None else shards(found)


def weights_of(path: Path) -> dict[str, Published]:
    """Return the weights in the file ``path`` of a checkpoint folder, by published name.

    Raises ConfigError if the folder has no readable layout file.
    """
    try:
        layout = msgspec.json.decode((path.parent / _LAYOUT).read_bytes(), type=GgufNames)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path.name} has no {_LAYOUT} in its folder; give the name of the .gguf file", param="--model"
        ) from error
    here = str(path.resolve())
    return {weight.name: weight for weight in published(layout) if weight.parts[0].path == here}


def _key(stem: str, parts: list[Path]) -> str:
    """Return a folder name: ``stem`` and a hash of path, size, modification time and inode of all parts."""
    digest = hashlib.sha256(f"{VERSION}".encode())
    for part in parts:
        state = part.stat()
        digest.update(f"\0{part}\0{state.st_size}\0{state.st_mtime_ns}\0{state.st_ino}".encode())
    return f"{stem[:80]}-{digest.hexdigest()[:16]}"


def _write(folder: Path, containers: list[Container]) -> None:
    """Write the files of the checkpoint folder: layout, tokenizer, links to the weights, and config.json
    last. Raises ConfigError for an unsupported model.

    An unusable tokenizer is noted in a file instead: see ``check_tokenizer``.
    """
    parts = [container.path for container in containers]
    metadata = containers[0].metadata
    tensors = [tensor for container in containers for tensor in container.tensors()]
    try:
        facts = ModelFacts(metadata)
        config = config_of(metadata, tensors, _rope_factors(tensors))
        layers = config["num_hidden_layers"]
        layout = GgufNames(facts.family, layers, facts.heads, facts.kv_heads, tuple(tensors), facts.delta)
        published(layout)  # raises for tensors of unsupported models, before an engine starts
    except ConfigError as error:
        raise ConfigError(f"{parts[0].name}: {error.message}", param=error.param) from error
    (folder / _LAYOUT).write_bytes(msgspec.json.encode(layout))
    try:
        texts = tokenizer_files(metadata)
    except ConfigError as error:
        texts = {_NO_TOKENIZER: f"the tokenizer in {parts[0].name} cannot be used: {error.message}"}
    for name, content in texts.items():
        (folder / name).write_text(content, encoding="utf-8")
    for number, part in enumerate(parts):
        os.symlink(part, folder / f"{_WEIGHTS}-{number:05d}.gguf")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _rope_factors(tensors: list[StoredTensor]) -> list[float] | None:
    for tensor in tensors:
        if tensor.name == "rope_freqs.weight" and tensor.kind == "F32":
            return [float(factor) for factor in tensor.data]
    return None
