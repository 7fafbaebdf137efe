"""The YAML configuration file: one flat mapping whose keys are flags without their dashes.

What it is made of serves for topology files, too: see ``weft.config.topology``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from weft.common.errors import ConfigError
from weft.config import foreign
from weft.config.flags import ALIASES, SETTINGS, check_same


def read_values(path: str | Path) -> dict[str, Any]:
    """Field name to parsed value, for every key of the file.

    ``max-num-seqs`` and ``max_num_seqs`` are the same key, and short names (``tp``) are keys, too. Raises
    ConfigError naming the file and the key when the file can't be read, a key is unknown or given twice, or a
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
    """Field name to parsed value, of keys and values as YAML has them; see ``read_values``.

    ``name`` is what errors call the mapping, and ``param`` their parameter.
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
        if field in values:
            if SETTINGS[field].alias not in (key, spelled[field]):
                raise ConfigError(f"{name}: {key!r} is given twice", param=param)
            check_same(f"{name}: {spelled[field]}", values[field], key, parsed)
        values[field], spelled[field] = parsed, key
    return values


def field_of(key: str) -> str:
    """The field that a key of a file means, if there is one: ``max-num-seqs``, ``max_num_seqs``, ``tp``."""
    field = key.replace("-", "_")
    return ALIASES.get(field, field)


def load_yaml(path: str | Path, name: str, param: str) -> Any:
    """What the file holds; None if it is empty.

    Raises ConfigError, which calls the file ``name``, when it can't be read, is no YAML, or has a key twice
    in one mapping (a plain load keeps only the last).
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        loaded = yaml.safe_load(text)
    except OSError as error:
        why = error.strerror or "cannot be read"
        raise ConfigError(f"{name}: {why}", param=param) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = getattr(error, "problem", None) or "not UTF-8 text"
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{name} is not valid YAML: {problem}{where}", param=param) from error
    if root is not None:
        _check_keys(root, name, param)
    return loaded


def _check_keys(root: yaml.Node, name: str, param: str) -> None:
    nodes = [root]
    while nodes:
        node = nodes.pop()
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
