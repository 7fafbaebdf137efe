"""The YAML configuration file: one flat mapping whose keys are flags without their dashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from weft.common.errors import ConfigError
from weft.config.flags import ALIASES, SETTINGS, check_same, suggest


def read_values(path: str | Path) -> dict[str, Any]:
    """Field name to parsed value, for every key of the file.

    ``max-num-seqs`` and ``max_num_seqs`` are the same key, and short names (``tp``) are keys, too. Raises
    ConfigError naming the file and the key when the file can't be read, a key is unknown or given twice, or a
    value is wrong.
    """
    name = Path(path).name
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in _pairs(Path(path), name):
        field = key.replace("-", "_")
        field = ALIASES.get(field, field)
        if field not in SETTINGS:
            near = suggest(field.replace("_", "-"), (setting.key for setting in SETTINGS.values()))
            raise ConfigError(f"--config {name}: unknown key {key!r}.{near}", param="--config")
        parsed = SETTINGS[field].parse(value, f"--config {name}: {key.replace('_', '-')}")
        if field in values:
            if SETTINGS[field].alias not in (key, spelled[field]):
                raise ConfigError(f"--config {name}: {key!r} is given twice", param="--config")
            check_same(f"--config {name}: {spelled[field]}", values[field], key, parsed)
        values[field], spelled[field] = parsed, key
    return values


def _pairs(path: Path, name: str) -> list[tuple[str, Any]]:
    """The file's keys and values in order, repeated keys included (a plain load keeps only the last)."""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        loaded = yaml.safe_load(text)
    except OSError as error:
        why = error.strerror or "cannot be read"
        raise ConfigError(f"--config {name}: {why}", param="--config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = getattr(error, "problem", None) or "not UTF-8 text"
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"--config {name} is not valid YAML: {problem}{where}", param="--config") from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode) or not isinstance(loaded, dict):
        raise ConfigError(f"--config {name} must be a flat mapping, e.g. max-num-seqs: 16", param="--config")
    seen: set[str] = set()
    for node, _ in root.value:
        key = str(getattr(node, "value", ""))
        if key in seen:
            raise ConfigError(f"--config {name}: {key!r} is given twice", param="--config")
        seen.add(key)
    return [(str(key), value) for key, value in loaded.items()]
