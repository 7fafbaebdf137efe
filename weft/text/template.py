"""A chat template: compiled once, rendered under a budget."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError, TemplateError, UndefinedError

from weft.common.errors import InvalidRequest
from weft.text.limits import Budget, TemplateLimit
from weft.text.sandbox import TemplateEnvironment

MAX_SOURCE = 1 << 20


class ChatTemplate:
    """A compiled chat template. Thread-safe. Raises InvalidRequest when the source does not compile."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise InvalidRequest("the chat template is too long", param="chat_template")
        self.source = source
        self._environment = TemplateEnvironment()
        try:
            self._template = self._environment.from_string(source)
            tree = self._environment.parse(source)
        except (TemplateSyntaxError, TemplateError, RecursionError) as error:
            raise InvalidRequest(
                f"the chat template does not compile: {_reason(error)}", param="chat_template"
            ) from None
        self.takes_parts = _loops_over_content(tree)
        """Whether it looks through content that is a list of parts, as one that shows images does."""
        self.names_developer = "developer" in source
        self.uses_tools = "tools" in meta.find_undeclared_variables(tree)
        """Whether it shows tools to the model."""

    def render(self, variables: dict[str, Any], budget: Budget | None = None) -> str:
        """The text. Raises InvalidRequest, naming ``messages``, when the template refuses or fails."""
        try:
            return self._environment.render_limited(self._template, variables, budget or Budget())
        except Exception as error:  # a template can raise anything; all of it belongs to this request alone
            raise InvalidRequest(
                f"the chat template cannot render these messages: {_reason(error)}", param="messages"
            ) from None


def _reason(error: BaseException) -> str:
    """What went wrong in words that hold no path and no repr of an object."""
    if isinstance(error, TemplateLimit):
        return str(error)
    if isinstance(error, SecurityError):
        return "it tries something that is not allowed"
    if isinstance(error, UndefinedError):
        return "it needs a field that is missing"
    if isinstance(error, TemplateSyntaxError):
        return f"syntax error in line {error.lineno}"
    if isinstance(error, TemplateError):
        return str(error)[:500]
    return "it failed on them"


def _loops_over_content(tree: nodes.Template) -> bool:
    for loop in tree.find_all(nodes.For):
        for found in [loop.iter, *loop.iter.find_all((nodes.Getattr, nodes.Getitem, nodes.Name))]:
            if isinstance(found, nodes.Getattr) and found.attr == "content":
                return True
            if isinstance(found, nodes.Name) and found.name == "content":
                return True
            if (
                isinstance(found, nodes.Getitem)
                and isinstance(found.arg, nodes.Const)
                and found.arg.value == "content"
            ):
                return True
    return False
