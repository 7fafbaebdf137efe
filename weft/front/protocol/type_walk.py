"""Walks along a type and a JSON value of the type: drops nulls, and names the values that a field takes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import inspect

_STEPS = re.compile(r"\.(\w+)|\[(?:\d+|\.\.\.)\]")
MAX_NAMED = 16
"""Maximum values named in an error."""


@functools.cache
def _info(target: Any) -> inspect.Type:
    """Return the description of a type. The types of requests are few, so the cache stays small."""
    return inspect.type_info(target)


def without_nulls(value: Any, target: Any) -> Any:
    """Return ``value`` without null fields of structs, and without null values of typed mappings.

    Free-form parts (``dict[str, Any]``, such as JSON schemas) stay unchanged, because a null may have a
    meaning there.
    """
    return _without_nulls(value, _info(target))


def _without_nulls(value: Any, info: inspect.Type) -> Any:
    if isinstance(value, list):
        for member in _members(info):
            if isinstance(member, inspect.ListType):
                return [_without_nulls(one, member.item_type) for one in value]
    if not isinstance(value, dict):
        return value
    given = {name: one for name, one in value.items() if one is not None}
    for member in _members(info):
        if isinstance(member, inspect.DictType) and not isinstance(member.value_type, inspect.AnyType):
            return {name: _without_nulls(one, member.value_type) for name, one in given.items()}
        # A union of structs is tagged: the value names its struct. Without a name the value fits no struct.
        if isinstance(member, inspect.StructType) and (
            member.tag is None or value.get(member.tag_field) in (None, member.tag)
        ):
            types = {field.encode_name: field.type for field in member.fields}
            return {
                name: _without_nulls(one, types[name]) if name in types else one
                for name, one in given.items()
            }
    return value


def values_at(target: Any, path: str) -> list[str]:
    """Return the words that the type takes at ``path`` (msgspec's form: ``$.tools[0].type``): strings as they
    are, other values as JSON. Objects and lists that the field may also take are not named. Return [] for a
    field without fixed words, or with more than ``MAX_NAMED``."""
    found = list(_members(_info(target)))
    tags: list[Any] = []
    for step in _STEPS.finditer(path):
        tags = []
        inner: list[inspect.Type] = []
        for member in found:
            if isinstance(member, inspect.ListType | inspect.VarTupleType):
                inner += _members(member.item_type)
            elif isinstance(member, inspect.DictType):
                inner += _members(member.value_type)
            elif isinstance(member, inspect.StructType):
                if step[1] is not None and step[1] == member.tag_field:
                    tags.append(member.tag)
                inner += [
                    one
                    for field in member.fields
                    if field.encode_name == step[1]
                    for one in _members(field.type)
                ]
        found = inner
    literals = [
        value for member in found if isinstance(member, inspect.LiteralType) for value in member.values
    ]
    named = sorted(map(_shown, {*tags, *literals}))
    return named if len(named) <= MAX_NAMED else []


def _members(info: inspect.Type) -> Sequence[inspect.Type] | Iterator[inspect.Type]:
    return info.types if isinstance(info, inspect.UnionType) else (info,)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
