"""Location of a model: bundled, a local folder or GGUF file, or a repository on the Hugging Face hub.

No torch.
"""

from __future__ import annotations

import os.path
from pathlib import Path

from weft.common import env
from weft.common.errors import ConfigError
from weft.common.folder import expanded
from weft.common.lfs import SMALL_FILES, refuse_broken_links
from weft.common.spelling import misspelt
from weft.config.families.load import refuse_unserved
from weft.gguf.checkpoint_folder import check_tokenizer, checkpoint_folder, find_gguf

BUNDLED = Path(__file__).resolve().parents[1] / "checkpoints"

_WEIGHTS = {"pickle": ["*.bin", "*.pt", "*.pth"], "dummy": []}
_OTHER_FORMATS = ["original/*", "consolidated*", "*.gguf", "onnx/*", "openvino/*"]


def bundled_models() -> dict[str, str]:
    """Return name -> folder of the models that come with Weft."""
    if not BUNDLED.is_dir():
        return {}
    return {path.name: str(path) for path in sorted(BUNDLED.iterdir()) if (path / "config.json").is_file()}


def cached_models(cache_dir: str | None = None) -> list[str]:
    """Return the names of the model repositories in the hub client's local cache; [] without a cache."""
    return [name for name, _ in cached_sizes(cache_dir)]


def cached_sizes(cache_dir: str | None = None) -> list[tuple[str, int]]:
    """Return (name, bytes) of the model repositories in the hub client's local cache, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(cache_dir)
    except (CacheNotFound, ValueError, OSError):
        return []
    return sorted((repo.repo_id, repo.size_on_disk) for repo in found.repos if repo.repo_type == "model")


def resolve_model_path(
    name: str,
    revision: str | None = None,
    *,
    load_format: str = "auto",
    cache_dir: str | None = None,
    model_impl: str = "auto",
) -> str:
    """Return the local folder of ``name``; download missing files from the hub.

    The search order: a bundled model (write ``./name`` for a folder of the same name), an existing folder or
    GGUF file (converted to a folder: ``weft.gguf``), a hub repository ``owner/name``. ``revision``: branch,
    tag or commit; None for the default branch. ``load_format`` selects the weights; "dummy" downloads no
    weights. With HF_HUB_OFFLINE set, or without a network, only the local cache is used. ``cache_dir``
    replaces the hub client's cache folder. ``model_impl``: --model-impl, for the refusal before a download.

    Raise ConfigError with the places that were tried.
    """
    bundled = bundled_models()
    if name in bundled:
        if revision is not None:
            raise ConfigError(f"{name} comes with Weft and has no revisions", param="--revision")
        return bundled[name]
    if name and (local := _local_folder(name)) is not None:
        return local
    if not _is_repository(name):
        near = misspelt(name, bundled)
        hint = f" Did you mean {near!r}?" if near else ""
        raise ConfigError(
            f"there is no folder {name!r}, no bundled model of that name (there are: "
            f"{', '.join(bundled) or 'none'}), and it is not a hub name (owner/name).{hint}",
            param="--model",
        )
    return _snapshot(name, revision, load_format, cache_dir, model_impl)


def _local_folder(name: str) -> str | None:
    """Return the folder of a local model: a folder, or the converted folder of a GGUF file. None for another
    name. Raise ConfigError for a path that cannot be read, for another file, and for broken links."""
    path = expanded(name)
    try:
        if not path.is_dir() and path.suffix != ".gguf":
            if path.is_file():
                raise ConfigError(
                    f"{name!r} is a file: give the folder with config.json and the weights, or a .gguf file",
                    param="--model",
                )
            return None
        path = _snapshot_in(path)
        found = find_gguf(path)
    except OSError as error:  # a folder without permission, or a name that is too long
        raise ConfigError(f"{name[:200]!r} cannot be read: {error.strerror}", param="--model") from None
    if found is None:
        refuse_broken_links(path, "--model")
    # A GGUF file is converted once; afterwards the converted folder is used.
    return str(path) if found is None else checkpoint_folder(found)


def _snapshot_in(path: Path) -> Path:
    """Return the folder of the model if ``path`` is the folder of a repository in the hub client's cache,
    else ``path``. Raise ConfigError for several snapshots without a default branch."""
    if (path / "config.json").is_file() or not (path / "snapshots").is_dir():
        return path
    main = path / "refs" / "main"
    snapshots = sorted(one for one in (path / "snapshots").iterdir() if one.is_dir())
    if main.is_file():
        chosen = [one for one in snapshots if one.name == main.read_text(encoding="utf-8").strip()]
        snapshots = chosen or snapshots
    if len(snapshots) != 1:
        raise ConfigError(
            f"{path.name!r} is a folder of the hub client's cache with {len(snapshots)} snapshots: name one "
            "of the folders in its folder snapshots",
            param="--model",
        )
    return snapshots[0]


def is_local(name: str) -> bool:
    """Return True if ``resolve_model_path`` finds ``name`` without the hub, or refuses the name."""
    return name in bundled_models() or os.path.exists(expanded(name)) or not _is_repository(name)


def _is_repository(name: str) -> bool:
    """Return True for a name of the form owner/name."""
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and not name.startswith((".", "~", "/"))


def resolve_tokenizer_path(name: str | None, model_path: str) -> str:
    """Return the folder of ``--tokenizer``, by default the model's folder.

    Download the files of a hub repository ``name``, except weights. Raise ConfigError, also for a
    GGUF folder with an unreadable tokenizer.
    """
    path = model_path if name is None else resolve_model_path(name, load_format="dummy")
    check_tokenizer(Path(path))
    return path


def _snapshot(
    name: str, revision: str | None, load_format: str, cache_dir: str | None, model_impl: str
) -> str:
    """Download a hub repository and return the local folder.

    Blocks. Raise ConfigError, for an unsupported model or broken links before weights are downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    offline = env.get("HF_HUB_OFFLINE").upper() in ("1", "TRUE", "YES", "ON")
    shown = f"{name} at revision {revision}" if revision else name
    weights = _WEIGHTS.get(load_format, ["*.safetensors"])

    def fetched(patterns: list[str]) -> str:
        return snapshot_download(
            name,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=patterns,
            ignore_patterns=_OTHER_FORMATS,
            local_files_only=offline,
        )

    try:
        small = fetched([*SMALL_FILES])
        refuse_broken_links(Path(small), "--model")  # the cache may have lost its blobs
        if not weights:
            return small
        refuse_unserved(Path(small), model_impl)  # refuse before a download of hours
        return fetched([*SMALL_FILES, *weights])
    # Order matters: GatedRepoError is a RepositoryNotFoundError, and most others are OSErrors.
    except GatedRepoError as error:
        raise ConfigError(
            f"{shown} is gated: accept its terms on the hub and log in (hf auth login)"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"the hub has no revision {revision!r} of {name}", param="--revision") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"there is no folder {name!r} and no repository of that name on the hub "
            "(or it is private: hf auth login)",
            param="--model",
        ) from error
    except HFValidationError as error:
        raise ConfigError(f"{name!r} is neither a folder nor a valid hub name", param="--model") from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if offline else "the hub could not be reached"
        raise ConfigError(
            f"there is no folder {name!r}; {shown} is not in the local cache and {why}"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{shown} could not be downloaded: {type(error).__name__}", param="--model"
        ) from error
