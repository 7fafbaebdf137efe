"""Conversations in all forms that clients send, and their renderings by the reference library."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from tests.text.published.files import BOS, EOS, UNK
from weft.text.parsing.parser import Tool

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A city."},
        "days": {"type": "integer", "description": "How many."},
        "opts": {"type": "object", "description": "More.", "properties": {}},
        "tags": {"type": "array", "description": "Words.", "items": {"type": "string"}},
    },
    "required": ["city"],
}
TOOLS = (
    Tool(name="get_weather", description="Looks the weather up.", parameters=WEATHER),
    Tool(name="now", description="The time.", parameters={"type": "object", "properties": {}}),
)
PLAIN: dict[str, Any] = {"city": "Oslo"}
NESTED: dict[str, Any] = {
    "city": 'a "b" <c> & é\nnext',
    "days": 2,
    "opts": {"deep": {"list": [1, "x", True]}, "e": 1.5},
    "tags": ["x", "y z"],
}
THOUGHT = "I look the weather up."
Messages = list[dict[str, Any]]


def user(content: Any = "What is the weather?") -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: Any = "Be brief.") -> dict[str, Any]:
    return {"role": "system", "content": content}


def said(content: Any = "It rains.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def calling(*calls: tuple[str, dict[str, Any]], first: int = 0, **more: Any) -> dict[str, Any]:
    made = [
        {
            "id": f"callid{first + number:03d}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, **more, "tool_calls": made}


def result(number: int = 0, content: Any = "rain") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"callid{number:03d}", "content": content}


def _without(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "content"}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


ONE = calling(("get_weather", PLAIN))
TWO = calling(("get_weather", PLAIN), ("now", {}))
TURNS: dict[str, dict[str, Any]] = {
    "one call": ONE,
    "two calls": TWO,
    "nested arguments": calling(("get_weather", NESTED)),
    "no arguments": calling(("now", {})),
    "call with text": {**ONE, "content": "One moment."},
    "call with a thought": {**ONE, "reasoning_content": THOUGHT},
    "call, content absent": _without(ONE),
    "call, content empty": {**ONE, "content": ""},
}
"""Assistant turns with calls."""


def _with_results(turn: dict[str, Any]) -> Messages:
    return [user(), turn, *(result(number) for number in range(len(turn["tool_calls"])))]


CONVERSATIONS: dict[str, tuple[Messages, dict[str, Any]]] = {
    "plain": ([user()], {}),
    "system": ([system(), user()], {}),
    "several turns": ([user(), said(), user("And now?"), said("Sun."), user("Thanks.")], {}),
    "several turns, no prompt": ([system(), user(), said(), user("x"), said("y")], {"prompt": False}),
    "tools shown": ([system(), user()], {"tools": True}),
    **{name: (_with_results(turn), {"tools": True}) for name, turn in TURNS.items()},
    "calls at the end": ([user(), ONE], {"tools": True, "prompt": False}),
    "result, then an answer": ([*_with_results(ONE), said()], {"tools": True, "prompt": False}),
    "answer, then a turn": ([*_with_results(ONE), said(), user("And now?")], {"tools": True}),
    "calls in two turns": (
        [*_with_results(ONE), said(), user("x"), calling(("now", {}), first=7), result(7)],
        {"tools": True},
    ),
    "calls one after another": (
        [*_with_results(ONE), calling(("get_weather", NESTED), first=7), result(7, "sun")],
        {"tools": True},
    ),
    "several results": ([*_with_results(TWO), said(), user("x")], {"tools": True}),
    "thought in an answer": ([user(), said(reasoning_content=THOUGHT)], {"prompt": False}),
    "text parts": ([user(_parts("First.", "Second."))], {}),
    "text parts everywhere": (
        [system(_parts("A.", "B.")), user(_parts("C.", "D.")), said(_parts("E.", "F.")), user("G.")],
        {},
    ),
    "late system": ([user(), said(), system("Now in French."), user("x")], {}),
    "continued": ([user(), said("It rai")], {"prompt": False, "continued": True}),
    "words of special tokens": ([user("start"), said("object"), user("end"), said("im"), user("think")], {}),
    "markup in text": ([user("a <b> {{ c }} [d] 'e' \"f\" é 你\n\n g ")], {}),
}


def tool_dicts() -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": one.name, "description": one.description, "parameters": one.parameters},
        }
        for one in TOOLS
    ]


def reference(template: str, messages: Messages, options: dict[str, Any]) -> str | None:
    """Return the reference library's rendering, or None if the library cannot render ``messages``.

    Clients do not specify the form of arguments, reasoning and missing content for a template. The reference
    gets each possible form in turn. The chosen rendering shows the most calls and parts, and no value in
    Python syntax.
    """
    texts = [text for tried in _forms(messages) if (text := _render(template, tried, options)) is not None]
    plain = [text for text in texts if not any(one in text for one in _BAD)]
    best = max(plain or texts, key=lambda text: _read(text, messages), default=None)
    apart = _one_call_each(messages)
    if best is None or len(apart) == len(messages):
        return best
    # A dropped call has its name in the list of tools alone. Some templates drop all calls, in every form.
    without = _render(template, [messages[0]], options) or ""
    names = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
    lost = sum(best.count(name) == without.count(name) for name in names)
    return reference(template, apart, options) if 0 < lost < len(names) else best


def _one_call_each(messages: Messages) -> Messages:
    """Return messages with one call each, every call followed by the result of its id."""
    results = {message["tool_call_id"]: message for message in messages if message["role"] == "tool"}
    made: Messages = []
    for message in messages:
        for at, call in enumerate(message.get("tool_calls", ())):
            content = {} if at == 0 else {"content": None}
            made.append({**message, **content, "tool_calls": [call]})
            made += [results[call["id"]]] if call["id"] in results else []
        if "tool_calls" not in message and message["role"] != "tool":
            made.append(message)
    return made


_BAD = ("None", "null<", "\nnull", "{'city'", '\\"city\\"', "{'type'", '{"type": "text"')
"""Traces of values that a template printed instead of reading."""


def _read(text: str, messages: Messages) -> int:
    """Return the number of parts of ``messages`` that occur in ``text``."""
    wanted: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            wanted += [part["text"] for part in content]
        elif content and message["role"] == "user":
            wanted.append(content.strip())
        for call in message.get("tool_calls", ()):
            wanted += [call["function"]["name"], *(["Oslo"] if "Oslo" in str(call) else [])]
        wanted += [message["reasoning_content"]] if "reasoning_content" in message else []
    return sum(one in text for one in wanted)


def _forms(messages: Messages) -> Iterator[Messages]:
    """Yield ``messages`` in each form that a template may need."""
    calls = any("tool_calls" in message for message in messages)
    thought = any("reasoning_content" in message for message in messages)
    lists = {message["role"] for message in messages if isinstance(message.get("content"), list)}
    joins = [
        joined for size in range(len(lists) + 1) for joined in itertools.combinations(sorted(lists), size)
    ]
    dimensions = itertools.product(
        (False, True),
        ("object", "text") if calls else ("object",),
        ("as sent", "null", "", "absent") if calls else ("as sent",),
        ("reasoning_content", "reasoning", "thinking") if thought else ("",),
        joins,
    )
    for listed, arguments, nothing, field, joined in dimensions:
        made = copy.deepcopy(messages)
        for message in made:
            for call in message.get("tool_calls", ()) if arguments == "object" else ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            content = message.setdefault("content", None)
            if "tool_calls" in message and not content:
                if nothing == "absent":
                    del message["content"]
                elif nothing != "as sent":
                    message["content"] = None if nothing == "null" else ""
            elif listed and isinstance(content, str):
                message["content"] = _parts(content)
            elif message["role"] in joined and isinstance(content, list):
                text = "\n".join(part["text"] for part in content)
                message["content"] = _parts(text) if listed else text
            if "reasoning_content" in message:
                message[field] = message.pop("reasoning_content")
        yield made


_SAFE = re.compile(r"\|\s*safe\b")
"""Matches the filter ``safe``. In the reference library ``safe`` escapes every string added to its result as
HTML, which the makers of the templates do not do."""


def _render(template: str, messages: Messages, options: dict[str, Any]) -> str | None:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template(
            [messages],
            tools=tool_dicts() if options.get("tools") else None,
            chat_template=_SAFE.sub("", template),
            add_generation_prompt=options.get("prompt", True),
            continue_final_message=options.get("continued", False),
            bos_token=BOS,
            eos_token=EOS,
            unk_token=UNK,
        )
    except Exception:  # a template may raise any exception
        return None
    text: str = texts[0]
    return text
