"""A process that compiles and renders chat templates: ``python -m weft.text.template_worker DESCRIPTOR``.

A payload is a JSON object with ``source``. For rendering, the payload also has ``variables``, the ``tag`` of
words in ``variables``, and ``seconds``. The reply has the ``facts`` of the template or the ``text``; or
``error`` and ``param``. The JSON module of the standard library is used, because variables may contain large
integers and lone surrogates.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from weft.common.confine import confine
from weft.common.errors import InvalidRequest
from weft.common.workers import Answer, serve
from weft.text.limits import MAX_SECONDS, Budget
from weft.text.template import CompiledTemplate
from weft.text.words import received

CPU_SECONDS = MAX_SECONDS + 0.5
"""CPU seconds per payload. The budget ends most templates earlier and gives the reason."""
MEMORY = 512 << 20
"""Bytes beyond the memory of the started process."""
TEMPLATES = 8
"""Number of cached compiled templates."""


def main() -> None:
    """Run a template worker: answer payloads from the parent process until its end, with confined memory."""

    def prepare(greeting: bytes) -> Answer:
        confine(MEMORY)
        compiled = functools.lru_cache(TEMPLATES)(CompiledTemplate)
        return lambda payload: (_answer(compiled, json.loads(payload)),)

    serve(prepare, 0, CPU_SECONDS, tells=True)


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
