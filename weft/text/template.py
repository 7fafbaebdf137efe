"""A chat template, compiled and rendered in a separate process under a budget.

    ChatTemplate ──source, variables──► worker ──► CompiledTemplate ──► text, or an error

A template comes with a checkpoint and is therefore untrusted code. The sandbox charges the operations of a
template, but a single operation on nested lists can exceed any budget. Therefore the rendering process has
limits of CPU time and memory. A template beyond these limits ends its process.

The worker is ``python -m weft.text.template DESCRIPTOR``. A payload is a JSON object with ``source``. For
rendering, the payload also has ``variables``, the ``tag`` of words in ``variables``, and ``seconds``. The
reply has the ``facts`` of the template or the ``text``; or ``error`` and ``param``. The JSON module of the
standard library is used, because variables may contain large integers and lone surrogates.
"""

from __future__ import annotations

import atexit
import functools
import json
import sys
from typing import Any

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError, TemplateError, UndefinedError

from weft.common.confine import confine
from weft.common.errors import DeadlineExceeded, InvalidRequest
from weft.common.guard import Guard
from weft.common.workers import Answer, WorkerDied, serve
from weft.text.limits import MAX_SECONDS, Budget, TemplateLimit
from weft.text.marks import received, secret_digits, sent
from weft.text.sandbox import TemplateEnvironment

MAX_SOURCE = 1 << 20
WALL_SECONDS = 10.0
"""Maximum wall-clock seconds of one rendering on an overloaded machine. The CPU limit normally applies
first.
"""


TOO_EXPENSIVE = "template_too_expensive"
"""Error code after the end of a template's process."""


class CompiledTemplate:
    """A compiled chat template, for the rendering process. Thread-safe.

    The public attributes are copied to ``ChatTemplate``. Raises InvalidRequest if the source does not
    compile.
    """

    def __init__(self, source: str) -> None:
        """Compile ``source``. Raises InvalidRequest if the source does not compile."""
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
        """True if the template loops over content as a list of parts, as needed for images."""
        self.names_developer = "developer" in source
        self.uses_tools = "tools" in meta.find_undeclared_variables(tree)
        """True if the template shows tools to the model."""

    def render(self, variables: dict[str, Any], budget: Budget | None = None) -> str:
        """Return the text.

        Raises InvalidRequest with ``messages`` if the template refuses, fails or exceeds ``budget``. None
        means a budget with the default limits.
        """
        try:
            return self._environment.render_limited(self._template, variables, budget or Budget())
        except Exception as error:  # a template can raise anything, and only this request is concerned
            raise InvalidRequest(
                f"the chat template cannot render these messages: {_reason(error)}", param="messages"
            ) from None


class ChatTemplate:
    """A chat template, compiled and rendered by another process. Thread-safe.

    Raises InvalidRequest if the source does not compile, or takes too long to compile.
    """

    takes_parts: bool
    names_developer: bool
    uses_tools: bool

    def __init__(self, source: str) -> None:
        """Compile ``source`` in a rendering process.

        Blocks until the process has answered. The attributes of ``CompiledTemplate`` are copied from the
        reply. Raises InvalidRequest if ``source`` is too long, does not compile or takes too long.
        """
        if len(source) > MAX_SOURCE:
            raise InvalidRequest(
                f"the chat template has more than {MAX_SOURCE} characters", param="chat_template"
            )
        self.source = source
        vars(self).update(_asked({"source": source}, "chat_template")["facts"])

    def render(self, variables: dict[str, Any], seconds: float = MAX_SECONDS) -> str:
        """Return the text for ``variables`` (JSON values and words of ``weft.text.marks``). ``seconds`` is
        the time limit.

        Raises InvalidRequest with ``messages`` if the template refuses, fails or exceeds a limit.
        """
        tag = secret_digits()  # no string of a client starts with the tag
        asked = {"source": self.source, "variables": sent(variables, tag), "tag": tag, "seconds": seconds}
        text: str = _asked(asked, "messages")["text"]
        return text


@functools.cache
def _guard() -> Guard:
    """Return the guard of the rendering processes, shared by all templates of this process."""
    guard = Guard((sys.executable, "-m", "weft.text.template"), b"-")
    atexit.register(guard.close)
    return guard


def _asked(asked: dict[str, Any], param: str) -> dict[str, Any]:
    """Return the reply of a rendering process; blocks for at most ``WALL_SECONDS``.

    Raises InvalidRequest: with the reply's own parameter for an error reply, with ``param`` and the code
    ``TOO_EXPENSIVE`` without a reply. Raises Unavailable if no process can be started.
    """
    try:
        answer: dict[str, Any] = json.loads(_guard().call(json.dumps(asked).encode(), WALL_SECONDS))
    except (DeadlineExceeded, WorkerDied):
        raise InvalidRequest(
            "the chat template needs too much time or memory; start the server with --chat-template and "
            "another template",
            param=param,
            code=TOO_EXPENSIVE,
        ) from None
    if "error" in answer:
        raise InvalidRequest(answer["error"], param=answer["param"])
    return answer


def _reason(error: BaseException) -> str:
    """Return the reason of a failure, without any path or object repr."""
    if isinstance(error, TemplateLimit):
        return str(error)
    if isinstance(error, MemoryError):
        return "the template produces too much text"
    if isinstance(error, SecurityError):
        return "the template does something that is not allowed"
    if isinstance(error, UndefinedError):
        return "the template needs a field that is missing"
    if isinstance(error, TemplateSyntaxError):
        return f"syntax error in line {error.lineno}"
    if isinstance(error, TemplateError):
        return str(error)[:500]
    return "the template failed"


def _loops_over_content(tree: nodes.Template) -> bool:
    """Return True if any loop of the template iterates over ``content``."""
    for loop in tree.find_all(nodes.For):
        # ``message.content``, ``content`` and ``message["content"]``, also inside filters.
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


CPU_SECONDS = MAX_SECONDS + 0.5
"""CPU seconds per payload. The budget ends most templates earlier and gives the reason."""
MEMORY_BYTES = 512 << 20
"""Bytes beyond the memory of the started process."""
TEMPLATES_CACHED = 8
"""Number of cached compiled templates."""


def main() -> None:
    """Run a template worker: answer payloads from the parent process until its end, with confined memory."""

    def prepare(greeting: bytes) -> Answer:
        confine(MEMORY_BYTES)
        compiled = functools.lru_cache(TEMPLATES_CACHED)(CompiledTemplate)
        return lambda payload: (_answer(compiled, json.loads(payload)),)

    serve(prepare, 0, CPU_SECONDS, reports_ready=True)


def _answer(compiled: functools._lru_cache_wrapper[CompiledTemplate], asked: dict[str, Any]) -> bytes:
    """Return the reply to one payload as JSON. Errors of the template are replies too."""
    answer: dict[str, Any]
    try:
        template = compiled(asked["source"])
        if "variables" in asked:
            variables = received(asked["variables"], asked["tag"])
            answer = {"text": template.render(variables, Budget(asked["seconds"]))}
        else:
            answer = {"facts": {name: value for name, value in vars(template).items() if name[0] != "_"}}
    except InvalidRequest as error:
        answer = {"error": error.message, "param": error.param}
    return json.dumps(answer).encode()


if __name__ == "__main__":
    main()
