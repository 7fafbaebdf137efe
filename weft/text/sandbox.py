"""The environment of chat templates: sandboxed, with a deadline and size limits.

A template comes with a checkpoint and is therefore untrusted code. Jinja's immutable sandbox hides Python's
internals. This environment also limits the cost. Loops, calls, operators, filters, concatenations and output
are charged to a ``Budget``. Operations with a larger result than input are measured before they run. The time
of a single operation on one string within the size limit is not measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from weft.text import limits
from weft.text.limits import Budget, TemplateLimit
from weft.text.marks import Word, written

_REMOVED = ("format", "pprint", "random", "urlize", "xmlattr", "filesizeformat")
_MAX_SEPARATOR = 16
_KEEPS_WORDS = frozenset(
    (
        *(
            "abs",
            "attr",
            "batch",
            "capitalize",
            "count",
            "d",
            "default",
            "dictsort",
            "first",
            "float",
            "groupby",
        ),
        *(
            "int",
            "items",
            "join",
            "last",
            "length",
            "list",
            "lower",
            "map",
            "max",
            "min",
            "reject",
            "rejectattr",
        ),
        *(
            "reverse",
            "round",
            "select",
            "selectattr",
            "slice",
            "sort",
            "string",
            "sum",
            "tojson",
            "trim",
            "unique",
        ),
        *("upper", "wordcount"),
    )
)
"""Filters that pass values on, compare values, or write a ``Word`` with its marks."""
_MAKES_TEXT = frozenset(("center", "format", "format_map", "join", "ljust", "replace", "rjust"))
"""String methods that insert their arguments into a text."""


class _Generation(Extension):
    """``{% generation %}`` marks assistant text for training. Here the tag has no effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """``dict`` for templates, without access to the class and its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """``namespace`` for templates. Refuses names with a leading underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError("a chat template cannot set attributes that begin with an underscore")
        super().__setitem__(name, value)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates as Hugging Face does and charges every operation to the current budget."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        """Replace Jinja's filters and globals by versions within the budget, and remove expensive ones."""
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControls])
        # Jinja's ``safe`` would escape the quotes of every string that is added to its result.
        self.filters.update(tojson=_tojson, safe=str)
        for name in _REMOVED:
            self.filters.pop(name)
        self.filters = {name: _charged(name, apply) for name, apply in self.filters.items()}
        self.filters.update(weft_loop=_loop, weft_concat=_concat, weft_write=_write)
        self.globals.pop("lipsum")
        self.globals.update(
            raise_exception=_raise, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _guard(tree)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow ``append`` and ``pop`` of lists, which published templates use. All lists belong to one
        rendering.
        """
        return (attr in ("append", "pop") and type(obj) is list) or super().is_safe_attribute(
            obj, attr, value
        )

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``__obj`` within the budget.

        Arguments inserted into a text get their marks first. Raises TemplateLimit if the budget is used up or
        the result is too large.
        """
        budget = limits.current()
        budget.tick()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        subject = getattr(method, "__self__", None)
        if isinstance(subject, str) and method.__name__ in _MAKES_TEXT:
            args, kwargs = tuple(written(args)), written(kwargs)
            if type(subject) is Word:
                __obj = __self.getattr(str(subject), method.__name__)
        limits.check_counts([*args, *kwargs.values()])
        limits.check_method(__obj, args)
        return budget.result(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply a binary operator within the budget.

        Raises TemplateLimit before an operation with too large a result.
        """
        limits.current().tick()
        if operator == "%":
            left, right = written(left), tuple(written(right)) if isinstance(right, tuple) else written(right)
        limits.check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def render_limited(self, template: Template, variables: dict[str, Any], budget: Budget) -> str:
        """Return the template's text. Raises TemplateLimit, or any error of the template."""
        token = limits.under(budget)
        try:
            chunks: list[str] = []
            length = 0
            for chunk in template.generate(variables):
                budget.tick()
                length += len(chunk)
                budget.size(length)
                chunks.append(chunk)
            return "".join(chunks)
        finally:
            limits.over(token)


def _guard(node: nodes.Node) -> None:
    """Insert budget filters around loops, ``a ~ b`` and written values in the whole tree, in place."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_guarded(item) for item in value]
        elif isinstance(value, nodes.Node):
            setattr(node, field, _guarded(value))
    # The children are done: now wrap the parts of this node.
    if isinstance(node, nodes.For):
        node.iter = _filtered(node.iter, "weft_loop")
    elif isinstance(node, nodes.Output):
        node.nodes = [
            _filtered(item, "weft_write")
            if isinstance(item, nodes.Expr) and not isinstance(item, nodes.TemplateData)
            else item
            for item in node.nodes
        ]


def _guarded(value: Any) -> Any:
    """Return a node with budget filters inserted; ``a ~ b`` becomes a filter call.

    Other values are unchanged.
    """
    if isinstance(value, nodes.Node):
        _guard(value)
    if isinstance(value, nodes.Concat):
        return _filtered(nodes.List(value.nodes, lineno=value.lineno), "weft_concat")
    return value


def _filtered(value: Any, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _loop(values: Iterable[Any]) -> Iterator[Any]:
    budget = limits.current()
    for value in values:
        budget.tick()
        yield value


def _concat(parts: list[Any]) -> str:
    """Return the texts joined, within the budget. Raises TemplateLimit if the result is too long."""
    budget = limits.current()
    budget.tick()
    texts = [str(part) for part in parts]
    budget.size(sum(map(len, texts)))
    return "".join(texts)


def _write(value: Any) -> str:
    text = str(value)
    limits.current().write(len(text))
    return text


def _charged(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return the built-in filter ``apply`` with budget charges: each call may raise TemplateLimit.

    Jinja's marks for passing environment or context are kept.
    """
    passes = 1 if getattr(apply, "jinja_pass_arg", None) is not None else 0

    def charged(*args: Any, **kwargs: Any) -> Any:
        budget = limits.current()
        budget.tick()
        # A filter with an environment or context argument receives that argument first.
        own = args[passes:]
        if name not in _KEEPS_WORDS:
            own = tuple(written(value) for value in own)
        limits.check_counts([*own[1:], *kwargs.values()])
        if name == "replace":
            budget.size(limits.replaced(*own, *kwargs.values()))
        elif name == "join":
            own = (list(own[0]), *own[1:])
            budget.size(limits.joined(own[1] if len(own) > 1 else kwargs.get("d", ""), own[0]))
        # Upper bound: every line (for wordwrap, every character) gains the longest argument.
        elif name in ("indent", "wordwrap"):
            extra = [
                len(value) if isinstance(value, str) else value for value in [*own[1:], *kwargs.values()]
            ]
            lines = len(str(own[0])) if name == "wordwrap" else str(own[0]).count("\n") + 1
            budget.size(lines * max([value for value in extra if isinstance(value, int)], default=4))
        return budget.result(apply(*args[:passes], *own, **kwargs))

    charged.__dict__.update(getattr(apply, "__dict__", {}))
    return charged


def _raise(message: Any) -> None:
    raise TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes. Raises TemplateLimit for long separators or indents.

    Keys are sorted here, not by ``json``: the mark around a word must not move its key.
    """
    if any(isinstance(item, str) and len(item) > _MAX_SEPARATOR for item in [indent, *(separators or ())]):
        raise TemplateLimit("the chat template produces too much text")
    if isinstance(indent, int) and indent > _MAX_SEPARATOR:
        raise TemplateLimit("the chat template computes too large a number")

    def listed(iterator: Any) -> Any:
        """Return the iterator of a filter such as ``map`` as a list."""
        if not isinstance(iterator, Iterator):
            raise TypeError("not a JSON value")
        return prepared(list(_loop(iterator)))

    def prepared(item: Any) -> Any:
        return written(_sorted(item) if sort_keys else item)

    return json.dumps(
        prepared(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, default=listed
    )


def _sorted(value: Any) -> Any:
    """Return ``value`` with the keys of every dict in order. Words are compared as plain text."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
