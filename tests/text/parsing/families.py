"""Outputs of each family, written by hand from the family's templates: the oracle of the parser tests.

An output is a list of parts: reasoning, texts and groups of calls. ``Family.render`` writes the list in the
form of the family, and ``expected`` returns the events to expect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.text.parsing.declaration import OutputFormat, combined
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent, Reasoning
from weft.text.parsing.formats import CALLS, REASONING
from weft.text.parsing.parser import OutputSpec, Tool

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "note": {"type": "string", "description": "free text"},
    "days": {"type": "integer"},
    "scale": {"type": "number"},
    "exact": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "area": {"type": "object"},
}
TOOLS = (
    Tool(name="get_weather", parameters={"type": "object", "properties": PROPERTIES}),
    Tool(name="get", parameters={"type": "object", "properties": PROPERTIES}),
    Tool(name="mcp__files-read.v2", parameters={"type": "object", "properties": PROPERTIES}),
)
SPEC = OutputSpec(tools=TOOLS, tool_calls=True, reasoning=True)


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ReasoningMarks:
    text: str


@dataclass(frozen=True)
class Calls:
    calls: tuple[Call, ...]


Part = str | ReasoningMarks | Calls


@dataclass(frozen=True)
class Family:
    """Name the parsers of a family, and the form of a group of calls."""

    name: str
    calls: str
    reasoning: str
    write_calls: Callable[[Sequence[Call], int], str]
    """Writes calls. The second argument is the number of the first call within the output."""
    open: str = "<think>"
    close: str = "</think>"
    ids: Callable[[str, int], str] = field(default=lambda name, number: "")

    @property
    def declared(self) -> OutputFormat:
        made = combined(REASONING[self.reasoning], CALLS[self.calls])
        assert made is not None
        return made

    def render(self, parts: Sequence[Part]) -> str:
        """Return the text of an output. Texts and reasoning must not begin or end with white space."""
        if self.name == "gpt_oss":
            return _render_channels(parts)
        text = ""
        number = 0
        for part in parts:
            if isinstance(part, ReasoningMarks):
                text += f"\n{self.open}\n{part.text}\n{self.close}\n\n" if text else self._first(part)
            elif isinstance(part, Calls):
                text += ("\n\n" if text and not text.endswith("\n") else "") + self.write_calls(
                    part.calls, number
                )
                number += len(part.calls)
            else:
                text += part
        return text

    def _first(self, part: ReasoningMarks) -> str:
        return f"{self.open}\n{part.text}\n{self.close}\n\n"

    def expected(self, parts: Sequence[Part]) -> list[OutputEvent]:
        """The events of ``render(parts)``, texts joined."""
        events: list[OutputEvent] = []
        number = 0
        for part in parts:
            if isinstance(part, ReasoningMarks):
                events.append(Reasoning(part.text))
            elif isinstance(part, Calls):
                for call in part.calls:
                    events.append(CallBegin(call=number, name=call.name, id=self.ids(call.name, number)))
                    events.append(CallArguments(call=number, text=json.dumps(call.arguments)))
                    events.append(CallEnd(call=number))
                    number += 1
            else:
                events.append(Content(part))
        return joined(events)


def joined(events: Sequence[OutputEvent]) -> list[OutputEvent]:
    """Events with neighbouring pieces of the same text joined."""
    result: list[OutputEvent] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.call == event.call:
            result[-1] = CallArguments(call=event.call, text=last.text + event.text)
        else:
            result.append(event)
    return result


def by_value(events: Sequence[OutputEvent]) -> list[Any]:
    """Return events with complete arguments replaced by their values."""
    return [
        (event.call, json.loads(event.text)) if isinstance(event, CallArguments) else event
        for event in joined(events)
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: Sequence[Call], first: int) -> str:
    return "\n".join(
        "<tool_call>\n" + _json({"name": call.name, "arguments": call.arguments}) + "\n</tool_call>"
        for call in calls
    )


def _bare(calls: Sequence[Call], first: int) -> str:
    return "\n".join(_json({"name": call.name, "arguments": call.arguments}) for call in calls)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _qwen3_coder(calls: Sequence[Call], first: int) -> str:
    text = []
    for call in calls:
        values = "".join(
            f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in call.arguments.items()
        )
        text.append(f"<tool_call>\n<function={call.name}>\n{values}</function>\n</tool_call>")
    return "\n".join(text)


def _glm45(calls: Sequence[Call], first: int) -> str:
    text = []
    for call in calls:
        values = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        text.append(f"<tool_call>{call.name}\n{values}</tool_call>")
    return "\n".join(text)


def _deepseek_v3(calls: Sequence[Call], first: int) -> str:
    made = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{_json(call.arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{made}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call], first: int) -> str:
    made = "".join(
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{_json(call.arguments)}<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{made}<｜tool▁calls▁end｜>"


def _deepseek_v32(calls: Sequence[Call], first: int, section: str = "function_calls") -> str:
    text = []
    for call in calls:
        values = "".join(
            f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
            f"{_plain(value)}</｜DSML｜parameter>\n"
            for key, value in call.arguments.items()
        )
        text.append(f'<｜DSML｜invoke name="{call.name}">\n{values}</｜DSML｜invoke>\n')
    return f"<｜DSML｜{section}>\n{''.join(text)}</｜DSML｜{section}>"


def _deepseek_v4(calls: Sequence[Call], first: int) -> str:
    return _deepseek_v32(calls, first, "tool_calls")


def _llama3_json(calls: Sequence[Call], first: int) -> str:
    return "; ".join(_json({"name": call.name, "parameters": call.arguments}) for call in calls)


def _python_tag(calls: Sequence[Call], first: int) -> str:
    return "<|python_tag|>" + _llama3_json(calls, first)


def _pythonic(calls: Sequence[Call], first: int) -> str:
    made = ", ".join(
        f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
        for call in calls
    )
    return f"[{made}]"


def _lfm2(calls: Sequence[Call], first: int) -> str:
    return f"<|tool_call_start|>{_pythonic(calls, first)}<|tool_call_end|>"


def _apertus(calls: Sequence[Call], first: int) -> str:
    made = _json([{call.name: call.arguments} for call in calls])
    return f"<|tools_prefix|>{made}<|tools_suffix|>"


def _apriel(calls: Sequence[Call], first: int) -> str:
    made = _json([{"name": call.name, "arguments": call.arguments} for call in calls])
    return f"<tool_calls>{made}</tool_calls>"


def _command_a(calls: Sequence[Call], first: int) -> str:
    made = [{"tool_name": call.name, "parameters": call.arguments} for call in calls]
    return f"<|START_ACTION|>{_json(made)}<|END_ACTION|>"


def _gigachat3(calls: Sequence[Call], first: int) -> str:
    return "\n".join(
        "<|function_call|>" + _json({"name": call.name, "arguments": call.arguments}) for call in calls
    )


def _seed_oss(calls: Sequence[Call], first: int) -> str:
    text = []
    for call in calls:
        values = "".join(
            f"<parameter={key}>{_plain(value)}</parameter>\n" for key, value in call.arguments.items()
        )
        text.append(f"<seed:tool_call>\n<function={call.name}>\n{values}</function>\n</seed:tool_call>")
    return "\n".join(text)


def _minimax_m2(calls: Sequence[Call], first: int) -> str:
    text = []
    for call in calls:
        values = "".join(
            f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in call.arguments.items()
        )
        text.append(f'<invoke name="{call.name}">\n{values}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(text)}</minimax:tool_call>"


def _objects(calls: Sequence[Call]) -> str:
    return _json([{"name": call.name, "arguments": call.arguments} for call in calls])


def _nemotron_json(calls: Sequence[Call], first: int) -> str:
    return f"<TOOLCALL>{_objects(calls)}</TOOLCALL>"


def _phi4_mini(calls: Sequence[Call], first: int) -> str:
    return f"<|tool_call|>{_objects(calls)}<|/tool_call|>"


def _functools(calls: Sequence[Call], first: int) -> str:
    return f"functools{_objects(calls)}"


def _command_r(calls: Sequence[Call], first: int) -> str:
    made = [{"tool_name": call.name, "parameters": call.arguments} for call in calls]
    return f"Action:\n```json\n[\n{_json(made)[1:-1]}\n]```"


def _olmo3(calls: Sequence[Call], first: int) -> str:
    made = [
        f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
        for call in calls
    ]
    return "<function_calls>\n" + "\n".join(made) + "\n</function_calls>"


GEMMA_QUOTE = '<|"|>'


def _noted(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, list):
        return "[" + ",".join(_noted(one, quote) for one in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_noted(one, quote)}" for key, one in value.items()) + "}"
    return "null" if value is None else _json(value)


def _gemma4(calls: Sequence[Call], first: int) -> str:
    made = [f"call:{call.name}{_noted(call.arguments, GEMMA_QUOTE)}" for call in calls]
    return "".join(f"<|tool_call>{text}<tool_call|>" for text in made)


def _functiongemma(calls: Sequence[Call], first: int) -> str:
    return "".join(
        f"<start_function_call>call:{call.name}{_noted(call.arguments, '<escape>')}<end_function_call>"
        for call in calls
    )


def _step3(calls: Sequence[Call], first: int) -> str:
    text = []
    for call in calls:
        values = "".join(
            f'<steptml:parameter name="{key}">{_plain(value)}</steptml:parameter>\n'
            for key, value in call.arguments.items()
        )
        text.append(
            f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{call.name}">\n{values}'
            "</steptml:invoke><｜tool_call_end｜>"
        )
    return "<｜tool_calls_begin｜>" + "\n".join(text) + "<｜tool_calls_end｜>"


def _hy_v3(calls: Sequence[Call], first: int) -> str:
    text = []
    for call in calls:
        values = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        text.append(f"<tool_call>{call.name}<tool_sep>\n{values}</tool_call>")
    return "<tool_calls>\n" + "\n".join(text) + "\n</tool_calls>"


def _solar(calls: Sequence[Call], first: int) -> str:
    made = "".join(
        f"<|tool_call:begin|>{first + number}<|tool_call:name|>{call.name}<|tool_call:args|>"
        f"{_json(call.arguments)}<|tool_call:end|>"
        for number, call in enumerate(calls)
    )
    return f"<|tool_calls|>{made}<|calls|>"


def _mistral_list(calls: Sequence[Call], first: int) -> str:
    made = [
        {"name": call.name, "arguments": call.arguments, "id": f"call{first + number:05d}"}
        for number, call in enumerate(calls)
    ]
    return "[TOOL_CALLS]" + _json(made)


def _mistral(calls: Sequence[Call], first: int) -> str:
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{_json(call.arguments)}" for call in calls)


def _kimi_k2(calls: Sequence[Call], first: int) -> str:
    made = "".join(
        f"<|tool_call_begin|>functions.{call.name}:{first + number}<|tool_call_argument_begin|>"
        f"{_json(call.arguments)}<|tool_call_end|>"
        for number, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{made}<|tool_calls_section_end|>"


def _render_channels(parts: Sequence[Part]) -> str:
    messages: list[str] = []
    for part in parts:
        if isinstance(part, ReasoningMarks):
            messages.append(f"<|channel|>analysis<|message|>{part.text}<|end|>")
        elif isinstance(part, Calls):
            messages += [
                f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
                f"{_json(call.arguments)}<|call|>"
                for call in part.calls
            ]
        else:
            messages.append(f"<|channel|>final<|message|>{part}<|end|>")
    return "<|start|>assistant".join(messages)


def _never(calls: Sequence[Call], first: int) -> str:
    raise AssertionError("written by messages")


FAMILIES = {
    family.name: family
    for family in (
        Family("hermes", "hermes", "qwen3", _hermes),
        Family("bare", "hermes", "qwen3", _bare),
        Family("qwen3_coder", "qwen3_coder", "qwen3", _qwen3_coder),
        Family("glm45", "glm45", "glm45", _glm45),
        Family("deepseek_v3", "deepseek_v3", "deepseek_r1", _deepseek_v3),
        Family("deepseek_v31", "deepseek_v31", "deepseek_v3", _deepseek_v31),
        Family("deepseek_v32", "deepseek_v32", "deepseek_v3", _deepseek_v32),
        Family("deepseek_v4", "deepseek_v4", "deepseek_v3", _deepseek_v4),
        Family(
            "apertus",
            "apertus",
            "apertus",
            _apertus,
            open="<|inner_prefix|>",
            close="<|inner_suffix|>",
        ),
        Family(
            "apriel",
            "apriel",
            "apriel",
            _apriel,
            open="Here are my reasoning steps:",
            close="[BEGIN FINAL RESPONSE]",
        ),
        Family(
            "command_a",
            "command_a",
            "command_a",
            _command_a,
            open="<|START_THINKING|>",
            close="<|END_THINKING|>",
        ),
        Family("gigachat3", "gigachat3", "qwen3", _gigachat3),
        Family("nemotron_json", "nemotron_json", "nemotron_v3", _nemotron_json),
        Family("phi4_mini", "phi4_mini_json", "qwen3", _phi4_mini),
        Family("functools", "phi4_mini_json", "qwen3", _functools),
        Family("command_r", "command_r", "qwen3", _command_r),
        Family("olmo3", "olmo3", "olmo3", _olmo3),
        Family("gemma4", "gemma4", "gemma4", _gemma4, open="<|channel>thought", close="<channel|>"),
        Family("functiongemma", "functiongemma", "qwen3", _functiongemma),
        Family("step3", "step3", "step3", _step3),
        Family("hy_v3", "hy_v3", "hy_v3", _hy_v3),
        Family(
            "solar_open",
            "solar_open",
            "solar_open",
            _solar,
            open="<|think|>",
            close="<|end|><|begin|>assistant",
            ids=lambda name, number: str(number),
        ),
        Family("lfm2", "lfm2", "qwen3", _lfm2),
        Family("minimax_m2", "minimax_m2", "qwen3", _minimax_m2),
        Family("seed_oss", "seed_oss", "seed_oss", _seed_oss, open="<seed:think>", close="</seed:think>"),
        Family("llama3_json", "llama3_json", "qwen3", _llama3_json),
        Family("python_tag", "llama3_json", "qwen3", _python_tag),
        Family("pythonic", "pythonic", "qwen3", _pythonic),
        Family("llama4", "llama4", "qwen3", _pythonic),
        Family("llama4_json", "llama4", "qwen3", _llama3_json),
        Family("mistral", "mistral", "mistral", _mistral, open="[THINK]", close="[/THINK]"),
        Family("mistral_list", "mistral", "mistral", _mistral_list, open="[THINK]", close="[/THINK]"),
        Family(
            "kimi_k2",
            "kimi_k2",
            "kimi_k2",
            _kimi_k2,
            ids=lambda name, number: f"functions.{name}:{number}",
        ),
        Family("gpt_oss", "openai", "openai_gptoss", _never),
    )
}
SAME = {
    "functiongemma",
    "functools",
    "nemotron_json",
    "command_r",
    "hy_v3",
    "step3",
    "phi4_mini",
    "llama4",
    "llama4_json",
}
"""Families with the same forms of arguments as others."""
