"""A chat template: compiled and rendered in a process of its own, under a budget.

    ChatTemplate ──source, variables──► template_worker ──► CompiledTemplate ──► text, or why there is none

A template comes with a checkpoint, so it is a stranger's code. The sandbox charges what a template does, but
one operation on nested lists can take longer than any budget. So the process that renders has a limit of CPU
time and memory, and ends with the template that exceeds it.
"""

from __future__ import annotations

import atexit
import functools
import json
import sys
from typing import Any

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError, TemplateError, UndefinedError

from weft.common.errors import DeadlineExceeded, InvalidRequest
from weft.common.guard import Guard
from weft.common.workers import WorkerDied
from weft.text.limits import MAX_SECONDS, Budget, TemplateLimit
from weft.text.private import secret_digits
from weft.text.sandbox import TemplateEnvironment
from weft.text.words import sent

MAX_SOURCE = 1 << 20
WALL_SECONDS = 10.0
"""Seconds for one rendering on a machine that is short of cores. CPU time is what ends a template before."""


TOO_EXPENSIVE = "template_too_expensive"
"""Code of the error when a template's process was ended."""


class CompiledTemplate:
    """A compiled chat template, for the process that renders. Thread-safe. Public attributes are facts that
    ``ChatTemplate`` has, too. Raises InvalidRequest when the source does not compile."""

    def __init__(self, source: str) -> None:
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


class ChatTemplate:
    """A chat template that another process compiles and renders. Thread-safe.

    Raises InvalidRequest when the source does not compile, or takes too long to.
    """

    takes_parts: bool
    names_developer: bool
    uses_tools: bool

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise InvalidRequest("the chat template is too long", param="chat_template")
        self.source = source
        vars(self).update(_asked({"source": source}, "chat_template")["facts"])

    def render(self, variables: dict[str, Any], seconds: float = MAX_SECONDS) -> str:
        """The text for ``variables``, JSON values and words (``weft.text.words``), within ``seconds``.

        Raises InvalidRequest, naming ``messages``, when the template refuses, fails or exceeds its limits.
        """
        tag = secret_digits()  # no string of a client begins with it
        asked = {"source": self.source, "variables": sent(variables, tag), "tag": tag, "seconds": seconds}
        text: str = _asked(asked, "messages")["text"]
        return text


@functools.cache
def _guard() -> Guard:
    """The processes that render, shared by all templates of this process."""
    guard = Guard((sys.executable, "-m", "weft.text.template_worker"), b"-")
    atexit.register(guard.close)
    return guard


def _asked(asked: dict[str, Any], param: str) -> dict[str, Any]:
    """The answer of a process that renders. Raises InvalidRequest that names ``param``."""
    try:
        answer: dict[str, Any] = json.loads(_guard().call(json.dumps(asked).encode(), WALL_SECONDS))
    except (DeadlineExceeded, WorkerDied):
        raise InvalidRequest(
            "the chat template takes more time or memory than it may; give the server another one with "
            "--chat-template",
            param=param,
            code=TOO_EXPENSIVE,
        ) from None
    if "error" in answer:
        raise InvalidRequest(answer["error"], param=answer["param"])
    return answer


def _reason(error: BaseException) -> str:
    """What went wrong in words that hold no path and no repr of an object."""
    if isinstance(error, TemplateLimit):
        return str(error)
    if isinstance(error, MemoryError):
        return "it makes too much text"
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
