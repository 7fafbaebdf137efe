"""Read structural tags of clients as grammars."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Never

from weft.common.errors import InvalidRequest
from weft.grammar.backends.lowering import MAX_REPEATS
from weft.types import grammar as g

MAX_FORMATS = 1000


def read_structural_tag(value: Any, param: str) -> g.Grammar:
    """Return the grammar of a structural tag in either form. Raises InvalidRequest with the reason."""
    reader = _Reader(param)
    if not isinstance(value, dict):
        reader.refuse("a structural tag must be an object")
    if "format" in value:
        return reader.format(value["format"], "format", 1)
    if "structures" in value:
        return reader.structures(value)
    reader.refuse("a structural tag needs either format, or structures and triggers")


class _Reader:
    def __init__(self, param: str) -> None:
        """``param``: name of the request's parameter for errors.

        All methods raise InvalidRequest with ``param``.
        """
        self._param = param
        self._left = MAX_FORMATS
        self._forms: dict[str, Callable[[dict[str, Any], str, int], g.Grammar]] = {
            "const_string": lambda value, at, depth: g.Text(self._text(value, "value", at)),
            "any_text": self._any_text,
            "json_schema": lambda value, at, depth: self._schema(value.get("json_schema"), at),
            "regex": lambda value, at, depth: g.Regex(self._text(value, "pattern", at)),
            "grammar": lambda value, at, depth: g.ContextFree(self._text(value, "grammar", at)),
            "sequence": lambda value, at, depth: g.GrammarSequence(self._elements(value, at, depth)),
            "or": lambda value, at, depth: g.OneOf(self._elements(value, at, depth)),
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "optional": lambda value, at, depth: self._repeat(value, at, depth, 0, 1),
            "star": lambda value, at, depth: self._repeat(value, at, depth, 0, None),
            "plus": lambda value, at, depth: self._repeat(value, at, depth, 1, None),
            "repeat": self._repeat_counted,
        }
        self._fields = {
            "const_string": {"value"},
            "any_text": {"excludes"},
            "json_schema": {"json_schema"},
            "regex": {"pattern"},
            "grammar": {"grammar"},
            "sequence": {"elements"},
            "or": {"elements"},
            "tag": {"begin", "content", "end"},
            "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"},
            "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
            "optional": {"content"},
            "star": {"content"},
            "plus": {"content"},
            "repeat": {"content", "min", "max"},
        }

    def structures(self, value: dict[str, Any]) -> g.Grammar:
        """Read the older form: tags with schemas, started by triggers in free text. Raises InvalidRequest."""
        tags = value["structures"]
        if not isinstance(tags, list) or not tags:
            self.refuse("structures must be a list of at least one tag")
        parts: list[tuple[str, g.Grammar, tuple[str, ...]]] = []
        for number, tag in enumerate(tags):
            at = f"structures[{number}]"
            if not isinstance(tag, dict):
                self.refuse(f"{at} must be an object")
            schema = self._schema(tag.get("schema", {}), at)
            parts.append((self._text(tag, "begin", at), schema, (self._text(tag, "end", at),)))
        return self._triggered(parts, self._texts(value, "triggers", ""), (), least=0, most=None, only=False)

    def format(self, value: Any, at: str, depth: int) -> g.Grammar:
        """Read one format of the newer form. ``at`` is the path for errors. Raises InvalidRequest."""
        self._left -= 1
        if depth > g.MAX_DEPTH or self._left < 0:
            self.refuse(f"a structural tag has more than {MAX_FORMATS} formats, or {g.MAX_DEPTH} levels")
        if not isinstance(value, dict):
            self.refuse(f"{at} must be an object with a type")
        kind = value.get("type")
        if not isinstance(kind, str) or kind not in self._forms:
            known = ", ".join(sorted(self._forms))
            self.refuse(
                f"{at}: a format of type {json.dumps(kind)[:60]} is not supported; supported types: {known}"
            )
        for key, given in value.items():
            # Clients send every default: accept unknown fields without an effect.
            if key != "type" and key not in self._fields[kind] and given not in (None, [], False, "json"):
                self.refuse(f"{at}: {key} is not supported in a format of type {kind}")
        return self._forms[kind](value, at, depth)

    def _any_text(self, value: dict[str, Any], at: str, depth: int) -> g.Grammar:
        return g.FreeText(without=self._texts(value, "excludes", at) if value.get("excludes") else ())

    def _tag(self, value: dict[str, Any], at: str, depth: int) -> g.Grammar:
        begin, content, ends = self._read_tag(value, at, depth)
        return g.GrammarSequence((g.Text(begin), *self._content(content, ends)))

    def _read_tag(self, value: Any, at: str, depth: int) -> tuple[str, g.Grammar, tuple[str, ...]]:
        """Return begin, content and possible ends of a tag. Raises InvalidRequest."""
        if not isinstance(value, dict) or value.get("type", "tag") != "tag":
            self.refuse(f"{at} must be a format of type tag")
        end = value.get("end")
        ends = (end,) if isinstance(end, str) else self._texts(value, "end", at, empty=True)
        content = self.format(value.get("content"), f"{at}.content", depth + 1)
        return self._text(value, "begin", at), content, ends

    def _content(self, content: g.Grammar, ends: tuple[str, ...]) -> tuple[g.Grammar, ...]:
        """Return a content up to one of ``ends``. Free text stops at the first end to occur."""
        if isinstance(content, g.FreeText) and not content.ends and all(ends):
            return (g.FreeText(ends=ends, without=content.without),)
        closing = [g.Text(end) for end in ends]
        return (content, closing[0] if len(closing) == 1 else g.OneOf(tuple(closing)))

    def _triggered_tags(self, value: dict[str, Any], at: str, depth: int) -> g.Grammar:
        """Read free text with tags at triggers.

        ``stop_after_first``: the output ends behind the first tag. Raises InvalidRequest.
        """
        parts = [
            self._read_tag(tag, f"{at}.tags[{number}]", depth + 1)
            for number, tag in enumerate(self._list(value, "tags", at))
        ]
        excludes = self._texts(value, "excludes", at) if value.get("excludes") else ()
        once = bool(value.get("stop_after_first"))
        return self._triggered(
            parts,
            self._texts(value, "triggers", at),
            excludes,
            least=int(bool(value.get("at_least_one"))),
            most=1 if once else None,
            only=once,
        )

    def _triggered(
        self,
        tags: list[tuple[str, g.Grammar, tuple[str, ...]]],
        triggers: tuple[str, ...],
        excludes: tuple[str, ...],
        *,
        least: int,
        most: int | None,
        only: bool,
    ) -> g.Grammar:
        """Return free text with tags inside.

        ``only``: no text follows the first tag. Raises InvalidRequest.
        """
        by_trigger: dict[str, list[g.Grammar]] = {trigger: [] for trigger in triggers}
        for begin, content, ends in tags:
            # Two matching triggers would make the tag ambiguous.
            found = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(found) != 1:
                self.refuse(f"the tag that begins with {begin!r} must begin with exactly one of the triggers")
            rest = g.Text(begin[len(found[0]) :])
            by_trigger[found[0]].append(g.GrammarSequence((rest, *self._content(content, ends))))
        if not all(by_trigger.values()):
            self.refuse("every trigger must begin a tag")
        cases = tuple(
            g.GrammarSequence(
                (
                    g.FreeText(ends=(trigger,), without=(*(t for t in triggers if t != trigger), *excludes)),
                    parts[0] if len(parts) == 1 else g.OneOf(tuple(parts)),
                )
            )
            for trigger, parts in by_trigger.items()
        )
        once = cases[0] if len(cases) == 1 else g.OneOf(cases)
        text = g.FreeText(without=(*triggers, *excludes))
        if only:
            return once if least else g.OneOf((once, text))
        return g.GrammarSequence((g.Repeated(part=once, least=least, most=most), text))

    def _tags_with_separator(self, value: dict[str, Any], at: str, depth: int) -> g.Grammar:
        """Read tags with a separator between two tags, and no other text. Raises InvalidRequest."""
        tags = []
        for number, tag in enumerate(self._list(value, "tags", at)):
            begin, content, ends = self._read_tag(tag, f"{at}.tags[{number}]", depth + 1)
            tags.append(g.GrammarSequence((g.Text(begin), *self._content(content, ends))))
        return g.Repeated(
            part=tags[0] if len(tags) == 1 else g.OneOf(tuple(tags)),
            between=self._text(value, "separator", at),
            least=int(bool(value.get("at_least_one"))),
            most=1 if value.get("stop_after_first") else None,
        )

    def _repeat(self, value: dict[str, Any], at: str, depth: int, least: int, most: int | None) -> g.Grammar:
        inner = self.format(value.get("content"), f"{at}.content", depth + 1)
        return g.Repeated(part=inner, least=least, most=most)

    def _repeat_counted(self, value: dict[str, Any], at: str, depth: int) -> g.Grammar:
        """Read a repetition with ``min`` and ``max``; max -1 means any number. Raises InvalidRequest."""
        least, most = value.get("min"), value.get("max")
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in (least, most)):
            self.refuse(f"{at}: min and max must be whole numbers")
        assert isinstance(least, int)
        assert isinstance(most, int)
        if not 0 <= least <= MAX_REPEATS or not -1 <= most <= MAX_REPEATS:
            self.refuse(f"{at}: min and max must be at most {MAX_REPEATS}, max may be -1 for any number")
        return self._repeat(value, at, depth, least, None if most == -1 else most)

    def _elements(self, value: dict[str, Any], at: str, depth: int) -> tuple[g.Grammar, ...]:
        return tuple(
            self.format(one, f"{at}.elements[{number}]", depth + 1)
            for number, one in enumerate(self._list(value, "elements", at))
        )

    def _schema(self, schema: Any, at: str) -> g.Grammar:
        """Return the grammar of a JSON schema; the schema itself is checked at the compile.

        Raises InvalidRequest.
        """
        if schema is not True and not isinstance(schema, dict):
            self.refuse(f"{at}: a JSON schema must be an object")
        try:
            text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except (ValueError, RecursionError):
            self.refuse(f"{at}: the JSON schema is nested too deeply, or has numbers that are not finite")
        return g.JsonSchema(schema=text)

    def _text(self, value: dict[str, Any], key: str, at: str) -> str:
        found = value.get(key)
        if not isinstance(found, str):
            self.refuse(f"{at}.{key} must be a string")
        return found

    def _list(self, value: dict[str, Any], key: str, at: str) -> list[Any]:
        found = value.get(key)
        if not isinstance(found, list) or not found:
            self.refuse(f"{at}.{key} must be a list of at least one entry")
        return found

    def _texts(self, value: dict[str, Any], key: str, at: str, empty: bool = False) -> tuple[str, ...]:
        found = self._list(value, key, at)
        if not all(isinstance(one, str) and (one or empty) for one in found):
            self.refuse(f"{at}.{key} must have non-empty strings only".lstrip("."))
        return tuple(dict.fromkeys(found))

    def refuse(self, message: str) -> Never:
        """Raise InvalidRequest for the request's parameter."""
        raise InvalidRequest(message, param=self._param)
