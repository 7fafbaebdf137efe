"""Bodies of Ollama's API.

Fields and options without an effect on the answer (``keep_alive``, ``num_thread`` ...) are checked and
dropped. A field or option that would change the answer and is not supported is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.fields import is_one_of
from weft.front.protocol.keep_alive import kept_seconds
from weft.front.protocol.parse import Body, convert, printable, short

LATEST = ":latest"
"""Tag that clients add to a name without a tag."""


def untagged(name: str, serves: Callable[[str], bool]) -> str:
    """Return the name of a served model: without ``:latest``, unless a model has this tag."""
    return name if serves(name) else name.removesuffix(LATEST)


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a conversation. Unknown fields are ignored: clients send answers back."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    """Base64 texts."""
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    """For a result: name of the tool."""
    tool_call_id: str | None = None


class OllamaBody(Body, frozen=True, kw_only=True):
    """Fields of all requests that name a model."""

    model: str
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None
    """Seconds, or a duration such as ``5m``, that the model stays loaded after the request."""

    def check(self) -> None:
        """Raise InvalidRequest for an invalid field."""
        short("model", self.model)
        self.seconds_kept()

    def seconds_kept(self) -> float | None:
        """Return ``keep_alive`` in seconds; None if absent. Negative: for ever. Raises InvalidRequest."""
        return None if self.keep_alive is None else kept_seconds(self.keep_alive)


class _Generates(OllamaBody, frozen=True, kw_only=True):
    """Fields common to chat and generate."""

    neutral: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        "format": is_one_of("", {}),
        "suffix": is_one_of(""),
        "template": is_one_of(""),
        "context": is_one_of([]),
        "width": is_one_of(0),
        "height": is_one_of(0),
        "steps": is_one_of(0),
        "tools": is_one_of([]),
    }
    unsupported: ClassVar[frozenset[str]] = frozenset(
        ("suffix", "template", "context", "width", "height", "steps")
    )
    instead: ClassVar[Mapping[str, str]] = {
        "context": "send the conversation to /api/chat",
        "template": "start the server with --chat-template, or send raw: true",
        "suffix": "send the whole prompt with raw: true",
    }
    hints: ClassVar[Mapping[str, Any]] = {"truncate": bool, "shift": bool, "_debug_render_only": bool}

    format: str | dict[str, Any] | None = None
    """``json``, or a JSON schema."""
    stream: bool | None = None
    """Default: true."""
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Fields of OpenAI's API beside ``options``, as Vercel's AI SDK (ollama-ai-provider-v2) sends them. Ollama
    # drops these fields. Here the fields have their meaning, and a field of ``options`` wins.
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_output_tokens: int | None = None

    def beside(self) -> dict[str, str]:
        """Return parameter of OpenAI's API -> field of this body that sets the parameter. A field counts
        without an option of the same meaning."""
        options = self.options or {}
        found = {}
        for field, name in _BESIDE.items():
            option = "num_predict" if name == "max_tokens" else name
            if getattr(self, field) is not None and options.get(option) is None:
                found[name] = field
        return found

    def common(self) -> dict[str, Any]:
        """Return the fields common to both kinds of OpenAI's bodies. Raises InvalidRequest."""
        made: dict[str, Any] = {"model": self.model, "stream": self.stream is not False}
        made |= {name: getattr(self, field) for name, field in self.beside().items()}
        made |= sampling_of(self.options or {})
        if isinstance(self.format, str) and self.format != "json":
            raise InvalidRequest('format must be "json" or a JSON schema', param="format")
        if self.format == "json":
            made["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            # As in Ollama, a keyword that no grammar can enforce is dropped.
            schema = {"name": "format", "schema": self.format, "strict": False}
            made["response_format"] = {"type": "json_schema", "json_schema": schema}
        return made

    def chat(self) -> dict[str, Any]:
        """Return the fields of a chat body, without messages. Raises InvalidRequest."""
        made = self.common()
        if isinstance(self.think, bool):
            made["enable_thinking"] = self.think
        elif self.think is not None:
            made["reasoning_effort"] = self.think
        if self.logprobs:
            made |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return made


class OllamaChat(_Generates, frozen=True, kw_only=True):
    """POST /api/chat. Without messages, the request loads or unloads the model."""

    messages: list[_Message] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    """As in chat completions or in Responses. Ollama has no such field, but clients send the field."""

    @property
    def empty(self) -> bool:
        """True for a request that only loads or unloads the model."""
        return not self.messages

    def openai(self) -> dict[str, Any]:
        """Return the body of /v1/chat/completions. Raises InvalidRequest."""
        made = {**self.chat(), "messages": messages_of(self.messages or [])}
        if self.tools:
            made["tools"] = self.tools
        if self.tool_choice is not None:
            named = isinstance(self.tool_choice, dict) and self.tool_choice.get("name")
            function = {"type": "function", "function": {"name": named}}
            made["tool_choice"] = function if named else self.tool_choice
        return made


class OllamaGenerate(_Generates, frozen=True, kw_only=True):
    """POST /api/generate. Without a prompt, the request loads or unloads the model."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    """True: the prompt goes to the model as it is, without the chat template."""
    images: list[str] | None = None

    def check(self) -> None:
        """Raise InvalidRequest for fields that exclude each other."""
        super().check()
        for name in ("system", "images", "think"):
            if self.raw and getattr(self, name):
                raise InvalidRequest(f"{name} has no effect with raw; send only one of the two", param=name)

    @property
    def empty(self) -> bool:
        """True for a request that only loads or unloads the model."""
        return not self.prompt and not self.images

    def openai(self) -> dict[str, Any]:
        """Return the body of /v1/chat/completions; of /v1/completions for a raw prompt. Raises
        InvalidRequest."""
        if self.raw:
            made = {"max_tokens": 1 << 30, **self.common(), "prompt": self.prompt}
            return made | ({"logprobs": self.top_logprobs or 0} if self.logprobs else {})
        first = [_Message(role="system", content=self.system)] if self.system else []
        user = _Message(role="user", content=self.prompt or "", images=self.images)
        return {**self.chat(), "messages": messages_of([*first, user])}


class OllamaEmbed(OllamaBody, frozen=True, kw_only=True):
    """POST /api/embed."""

    input: str | list[str]
    truncate: bool | None = None
    """Default: true. Inputs beyond the context are cut at the end; false: refused."""
    dimensions: int | None = None

    def openai(self) -> dict[str, Any]:
        """Return the body of /v1/embeddings."""
        return _embeddings(self.model, self.input, self.truncate is not False, self.dimensions)


class OllamaEmbedding(OllamaBody, frozen=True, kw_only=True):
    """POST /api/embeddings, the older form for one text."""

    prompt: str

    def openai(self) -> dict[str, Any]:
        """Return the body of /v1/embeddings."""
        return _embeddings(self.model, self.prompt, True, None)


class OllamaShow(Body, frozen=True, kw_only=True):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None
    """Older name of ``model``."""
    verbose: bool | None = None

    def check(self) -> None:
        """Raise InvalidRequest without a name."""
        if not (self.model or self.name):
            raise InvalidRequest("model is required", param="model")


def _embeddings(model: str, texts: str | list[str], truncate: bool, dimensions: int | None) -> dict[str, Any]:
    made: dict[str, Any] = {"model": model, "input": texts}
    if truncate:
        made["truncate_prompt_tokens"] = -1
    if dimensions is not None:
        made["dimensions"] = dimensions
    return made


# fmt: off
_SAME = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "seed": int,
    "presence_penalty": float, "frequency_penalty": float, "stop": str | list[str],
}
_BESIDE = {
    "temperature": "temperature", "top_p": "top_p", "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty", "stop": "stop", "max_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
}
"""Field beside ``options`` -> parameter of OpenAI's API. The last field of one parameter wins."""
_NO_EFFECT = frozenset((
    "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only",
    "use_mmap", "use_mlock", "embedding_only", "num_thread", "num_keep", "numa",
    "mirostat_tau", "mirostat_eta", "penalize_newline", "draft_num_predict",
))
"""Options for the process that runs the model. Here flags of the server decide."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"tfs_z": (1,), "typical_p": (1,), "mirostat": (0,)}
"""Option -> values without effect. Other values are not supported."""
# fmt: on


def sampling_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as fields of OpenAI's bodies. Raises InvalidRequest for an unknown option, and for
    an option that is not supported."""
    made: dict[str, Any] = {}
    for name, value in options.items():
        where = f"options.{printable(name, 40)}"
        if value is None or name in _NO_EFFECT or value in _NEUTRAL.get(name, ()):
            continue
        # Ollama's server reads every number as a float.
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        if name in _SAME:
            made[name] = convert(where, value, _SAME[name])
        elif name == "num_predict":
            # Negative: no limit beside the context.
            most = convert(where, value, int)
            made |= {"max_tokens": most} if most >= 0 else {}
        elif name == "repeat_penalty":
            made["repetition_penalty"] = convert(where, value, float)
        elif name == "repeat_last_n":
            _check_span(convert(where, value, int), options.get("repeat_penalty"), where)
        elif name in _NEUTRAL:
            raise InvalidRequest(
                f"{where} is not supported by this server", param="options", code="unsupported_parameter"
            )
        else:
            raise InvalidRequest(f"unknown option: {where}", param="options", code="unknown_parameter")
    return made


def _check_span(span: int, penalty: Any, where: str) -> None:
    """Raise InvalidRequest for a penalty over a part of the context: here a penalty covers everything."""
    if span != -1 and penalty not in (None, 1, 1.0):
        raise InvalidRequest(
            f"{where} must be -1: repeat_penalty covers the whole context on this server",
            param="options",
            code="unsupported_parameter",
        )


def messages_of(messages: list[_Message]) -> list[dict[str, Any]]:
    """Return messages of OpenAI's API. Ollama's calls and results may have no ids: these ids become "".

    Raises InvalidRequest for a call without a function's name.
    """
    made = []
    for number, message in enumerate(messages):
        one: dict[str, Any] = {"role": message.role, "content": _content(message)}
        if message.thinking and message.role == "assistant":
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            one["tool_calls"] = [
                _call(call, f"messages[{number}].tool_calls[{at}]")
                for at, call in enumerate(message.tool_calls)
            ]
        if message.role == "tool":
            one["tool_call_id"] = message.tool_call_id or ""
            if message.tool_name:
                one["name"] = message.tool_name
        made.append(one)
    return made


def _content(message: _Message) -> str | list[dict[str, Any]] | None:
    if not message.images:
        return message.content if message.content is not None or message.tool_calls else ""
    text = [{"type": "text", "text": message.content}] if message.content else []
    urls = [image if image[:5] == "data:" else f"data:image/png;base64,{image}" for image in message.images]
    return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), *text]


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a call of OpenAI's API. Raises InvalidRequest for a call without a function's name."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function must be an object with a name", param="messages")
    own = call.get("id")
    given = {"name": function["name"], "arguments": function.get("arguments")}
    return {"id": own if isinstance(own, str) else "", "type": "function", "function": given}
