"""Requests of the Responses API, converted to the common form of all APIs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weft.common.errors import InvalidRequest, NotFound
from weft.front.protocol.conversation import AnswerOptions, Conversation, OutputConstraint, Sharing
from weft.front.protocol.parse import printable
from weft.front.protocol.responses.items import Adder
from weft.front.protocol.responses.protocol import (
    ENCRYPTED,
    LOGPROBS,
    NamedFormat,
    ObjectFormat,
    ResponsesRequest,
    TokensRequest,
)
from weft.front.protocol.responses.responses_tools import Named, Offered, offered
from weft.front.protocol.turns import Turns
from weft.grammar import build
from weft.types.sampling import SamplingParams

NAMES = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}
"""Conversation parameter -> parameter name in this API."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Stored items used by a request."""

    items: list[dict[str, Any]] = []
    """Input and output of the previous responses, oldest first."""
    referenced: dict[str, dict[str, Any]] = {}
    """Item id -> referenced item."""


class ResponsesFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the request for the answer."""

    repeats: dict[str, Any] = {}
    """Fields of the answer that repeat the request."""
    names: dict[str, Named] = {}
    """See ``Offered``."""
    items: bytes = b"[]"
    """Input of the request as JSON in stored form; an empty list if the response is not stored."""
    previous: str | None = None
    store: bool = False
    encrypted: bool = False
    """True if reasoning goes out in a form that clients can send back."""
    summarizes: bool = False
    """True if reasoning is shown as a summary."""
    logprobs: bool = False


def packed(facts: ResponsesFacts) -> bytes:
    """Return ``facts`` in the form carried by a job. Items, possibly megabytes of images, are on a line
    after the rest, so ``unpacked`` need not parse the items."""
    return msgspec.json.encode(msgspec.structs.replace(facts, items=b"")) + b"\n" + facts.items


def unpacked(data: bytes) -> ResponsesFacts:
    """Return the facts of ``packed``."""
    rest, _, items = data.partition(b"\n")
    return msgspec.structs.replace(msgspec.json.decode(rest, type=ResponsesFacts), items=items)


def conversation(
    asked: TokensRequest, history: History, *, system_inside: bool, join_users: bool = False
) -> tuple[Conversation, ResponsesFacts]:
    """Return (request in common form, facts for the answer).

    ``system_inside``, ``join_users``: see ``Turns``. Raises InvalidRequest, or NotFound for a reference to an
    item that is not stored.
    """
    turns = Turns(system_inside=system_inside, join_users=join_users)
    if asked.instructions:
        turns.system(asked.instructions)
    # The prompt: instructions, then stored items of previous responses, then the request's own items.
    adder = Adder(turns)
    for item in history.items:
        adder.add(item, "previous_response_id")
    items = _resolved(asked.input, history.referenced)
    for number, item in enumerate(items):
        adder.add(item, f"input[{number}]")
    tools = offered(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    whole = asked if isinstance(asked, ResponsesRequest) else None
    params = SamplingParams(max_tokens=1) if whole is None else _sampling(whole)
    made = Conversation(
        messages=turns.messages,
        params=params,
        form=AnswerOptions(
            model=asked.model or "", stream=whole is not None and bool(whole.stream), top=params.logprobs
        ),
        tools=tools.use,
        constraint=_constraint(asked),
        effort=_effort(asked),
        sharing=Sharing(session=_session(whole, history)),
    )
    return made, ResponsesFacts() if whole is None else _facts(whole, tools, items, params)


def _session(whole: ResponsesRequest | None, history: History) -> str:
    """Return the session name: the client's cache key, or the first item id of the continued conversation,
    or ""."""
    key = None if whole is None else whole.prompt_cache_key
    first = history.items[0].get("id") if history.items else None
    return key or (first if isinstance(first, str) else "")


def _resolved(
    given: str | list[dict[str, Any]] | None, referenced: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the items of an input, with references replaced by stored items. Raises InvalidRequest or
    NotFound."""
    if given is None or isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}] if given else []
    found = []
    named = set()
    for number, item in enumerate(given):
        if reference := reference_of(item):
            if reference in named:  # otherwise many short references could expand to megabytes of prompt
                raise InvalidRequest(
                    f"the input references the item {printable(reference, 64)} twice; reference an item once",
                    param=f"input[{number}]",
                )
            named.add(reference)
            if reference not in referenced:
                raise NotFound(
                    f"the item {printable(reference, 64)} is not stored here",
                    param=f"input[{number}]",
                    code="item_not_found",
                )
            item = referenced[reference]
        found.append(item)
    return found


def reference_of(item: Mapping[str, Any]) -> str | None:
    """Return the id of the stored item that ``item`` refers to; None for a normal item.

    Raises InvalidRequest for a reference without an id.
    """
    if item.get("type") == "item_reference":
        named = item.get("id")
        if not isinstance(named, str):
            raise InvalidRequest("an item_reference needs the id of a stored item", param="input")
        return named
    return None


def _sampling(asked: ResponsesRequest) -> SamplingParams:
    """Return the sampling parameters; absent parameters get the defaults. Raises InvalidRequest."""
    given: dict[str, Any] = {
        "max_tokens": asked.max_output_tokens,
        "stop": asked.stop,
        "stop_in": asked.stop_in,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "min_p": asked.min_p,
        "repetition_penalty": asked.repetition_penalty,
        "seed": asked.seed,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
    }
    if asked.includes(LOGPROBS) or asked.top_logprobs:
        given["logprobs"] = asked.top_logprobs or 0
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _constraint(asked: TokensRequest) -> OutputConstraint | None:
    """Return the required form of the answer; None for text. Raises InvalidRequest."""
    form = None if asked.text is None else asked.text.format
    param = "text.format"
    if isinstance(form, NamedFormat):
        grammar = build.json_schema(form.schema, param=param)
        return OutputConstraint(
            grammar=grammar, param=param, strict=form.strict is not False, may_loosen=True
        )
    if not isinstance(form, ObjectFormat):
        return None
    schema = form.schema
    grammar = build.json_object() if schema is None else build.json_schema(schema, param=param)
    return OutputConstraint(grammar=grammar, param=param)


def _effort(asked: TokensRequest) -> str | None:
    return None if asked.reasoning is None else asked.reasoning.effort


def _facts(
    asked: ResponsesRequest, tools: Offered, items: list[dict[str, Any]], params: SamplingParams
) -> ResponsesFacts:
    """Return the facts for the answer: settings to repeat, names of tools, and items to store (none without
    ``store``).
    """
    reasoning = asked.reasoning
    summarizes = reasoning is not None and reasoning.summarizes
    store = asked.store is not False
    return ResponsesFacts(
        repeats=_repeats(asked, tools, params, store),
        names=tools.names,
        items=kept_items(items if store else []),
        previous=asked.previous_response_id,
        store=store,
        encrypted=asked.includes(ENCRYPTED),
        summarizes=summarizes,
        logprobs=params.logprobs is not None,
    )


def _repeats(asked: ResponsesRequest, tools: Offered, params: SamplingParams, store: bool) -> dict[str, Any]:
    """Return the settings that the answer repeats, with the defaults of absent settings."""
    # Clients expect every field of OpenAI's answer, with its default where the request sets none.
    reasoning, text = asked.reasoning, asked.text
    form = None if text is None else text.format
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "prompt_cache_retention": asked.prompt_cache_retention,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary or reasoning.generate_summary,
        },
        "safety_identifier": asked.safety_identifier,
        "store": store,
        "temperature": params.temperature,
        "text": {
            "format": {"type": "text"} if form is None else msgspec.to_builtins(form),
            "verbosity": "medium" if text is None or text.verbosity is None else text.verbosity,
        },
        "tool_choice": "auto" if asked.tool_choice is None else msgspec.to_builtins(asked.tool_choice),
        "tools": [_complete(tool) for tool in tools.shown],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "truncation": "disabled",
        "user": asked.user,
    }


def _complete(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a function tool with all fields expected by clients. Other tools are returned unchanged."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": False, **tool}


def kept_items(items: Sequence[dict[str, Any]]) -> bytes:
    """Return the JSON of items in stored form."""
    return msgspec.json.encode([_with_id(item) for item in items])


def _with_id(item: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an item in stored form: with an id (new if missing), and content in parts."""
    item_type = item.get("type") or "message"
    item = _kept(item_type, item)
    content = item.get("content")
    if item_type == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        empty: dict[str, Any] = {"annotations": []} if part == "output_text" else {}
        item = {**item, "content": [{"type": part, "text": content, **empty}]}
    made = {**item, "type": item_type, "id": item.get("id") or new_id(item_type)}
    return made if item_type == "reasoning" else {"status": "completed", **made}


MOST_ID = 256
"""Maximum characters of a stored id, status or phase."""
_SHORT = frozenset({"id", "type", "status", "phase", "role", "detail"})
_FIELDS = {
    "message": {"role", "content", "phase"},
    "function_call": {"call_id", "name", "namespace", "arguments"},
    "function_call_output": {"call_id", "output"},
    "custom_tool_call": {"call_id", "name", "namespace", "input"},
    "custom_tool_call_output": {"call_id", "output"},
    "reasoning": {"summary", "content", "encrypted_content"},
}
"""Item type -> fields to store: fields that a later prompt may show, or that identify the item."""
_PART_FIELDS = frozenset({"type", "text", "refusal", "image_url", "detail"})


def _kept(item_type: str, item: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an item without fields that no prompt shows.

    Otherwise a client could fill the store at no cost.
    """
    fields = _FIELDS.get(item_type, frozenset()) | {"id", "type", "status"}
    kept = {name: value for name, value in item.items() if name in fields and _is_kept(name, value)}
    for name in ("content", "output", "summary"):
        if isinstance(parts := kept.get(name), list):
            kept[name] = [_kept_part(part) for part in parts]
    return kept


def _kept_part(part: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in part.items() if name in _PART_FIELDS and _is_kept(name, value)}
    return {**kept, "annotations": []} if part.get("type") == "output_text" else kept


def _is_kept(name: str, value: Any) -> bool:
    return name not in _SHORT or (isinstance(value, str) and len(value) <= MOST_ID)


_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}


def new_id(item_type: str) -> str:
    """Return a new id for an item of type ``item_type``."""
    return _PREFIXES.get(item_type, "item_") + secrets.token_hex(16)
