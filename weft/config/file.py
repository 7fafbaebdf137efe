"""The YAML configuration file: one flat mapping, with flags without dashes as keys.

Topology files use the same functions: see ``weft.config.topology``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from weft.common.errors import ConfigError
from weft.config import foreign
from weft.config.flags import ALIASES, SETTINGS, check_same

MOST_NODES = 100_000
"""Maximum number of values in a file."""


def read_values(path: str | Path) -> dict[str, Any]:
    """Return field name to parsed value, for every key of the file.

    ``max-num-seqs`` and ``max_num_seqs`` are the same key; short names (``tp``) are keys too. Raise
    ConfigError with the file and the key if the file cannot be read, a key is unknown or duplicate, or a
    value is wrong.
    """
    name = f"--config {Path(path).name}"
    loaded = load_yaml(path, name, "--config")
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{name} must be a flat mapping, e.g. max-num-seqs: 16", param="--config")
    return parse_values(loaded, name, "--config")


def parse_values(pairs: Mapping[Any, Any], name: str, param: str) -> dict[str, Any]:
    """Return field name to parsed value, for the pairs of a YAML mapping; see ``read_values``.

    ``name``: name of the mapping in errors. ``param``: parameter of the errors. Raise ConfigError for an
    unknown or duplicate key, and for a wrong value.
    """
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for given, value in foreign.fields(pairs).items():
        key = str(given)
        field = field_of(key)
        if field not in SETTINGS:
            near = foreign.unknown(key, (setting.key for setting in SETTINGS.values()))
            raise ConfigError(f"{name}: unknown key {key!r}.{near}", param=param)
        parsed = SETTINGS[field].parse(value, f"{name}: {key.replace('_', '-')}")
        # A key may come once by its name and once by its short name, if both have the same value.
        if field in values:
            if SETTINGS[field].alias not in (key, spelled[field]):
                raise ConfigError(f"{name}: {key!r} is given twice", param=param)
            check_same(f"{name}: {spelled[field]}", values[field], key, parsed)
        values[field], spelled[field] = parsed, key
    return values


def field_of(key: str) -> str:
    """Return the field name that a key stands for: ``max-num-seqs``, ``max_num_seqs``, ``tp``.

    May be unknown.
    """
    field = key.replace("-", "_")
    return ALIASES.get(field, field)


def load_yaml(path: str | Path, name: str, param: str) -> Any:
    """Return the content of the file; None for an empty file.

    Raise ConfigError, with ``name`` as the name of the file, if the file cannot be read, is not valid YAML,
    or has a duplicate key in any mapping. (A plain YAML load silently keeps the last value.) Also for a file
    with more than ``MOST_NODES`` values, in which each alias counts as a copy.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _check_nodes(root, name, param)  # first: a load copies mappings that aliases merge
        return yaml.safe_load(text)
    except OSError as error:
        raise unreadable(path, name, param, error) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # The loader makes dates and numbers of scalars; Python's errors for these have no line.
        problem = getattr(error, "problem", None) or str(error)
        if problem.startswith("but "):  # the second half of a sentence
            problem = f"{getattr(error, 'context', None)}, {problem}"
        if isinstance(error, UnicodeDecodeError):
            problem = "not UTF-8 text"
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{name} is not valid YAML: {problem}{where}", param=param) from error


def unreadable(path: str | Path, name: str, param: str, error: OSError) -> ConfigError:
    """Return the error for a file that cannot be read. ``name`` ends with the file's name; the error shows
    the path instead, because the path may be relative to another folder."""
    why = error.strerror or "cannot be read"
    return ConfigError(f"{name.removesuffix(Path(path).name)}{path}: {why}", param=param)


def _check_nodes(root: yaml.Node, name: str, param: str) -> None:
    """Raise ConfigError for a duplicate key in any mapping below ``root``, and for too many nodes."""
    nodes, count = [root], 0
    while nodes:
        node = nodes.pop()
        # Aliases inside aliases, or an alias inside its own node, would keep this loop busy for ever.
        count += len(node.value) if isinstance(node, yaml.CollectionNode) else 0
        if count > MOST_NODES:
            raise ConfigError(f"{name} has more than {MOST_NODES:,} values with all aliases", param=param)
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key_node, value in node.value:
                key = str(getattr(key_node, "value", ""))
                if key in seen:
                    raise ConfigError(f"{name}: {key!r} is given twice", param=param)
                seen.add(key)
                nodes.append(value)
