"""Messages to a prompt: validation, the template, and special tokens that only the template can write.

How user text is kept from becoming control tokens, although template and text end up in one string:

1. In every string of the request, wherever a special token is spelled, a *mark* (random digits, new for each
   rendering) goes in behind its first character. Where a string begins or ends with a piece of a special
   token, a mark goes there too, so that two strings, or a string and the template, cannot make one together.
2. The template is rendered. Special tokens found in the result are the template's own; they are rewritten to
   the private names of ``private.py``. Then the marks are taken out.
3. One pass of the private encoder makes the ids, as if the original tokenizer had seen the whole string.

Strings that hold nothing like a special token, which is nearly all of them, are not touched, so what a
template asks of them (``in``, ``split``, ``trim``) has its usual answer. Roles are a closed list, because
templates build tokens from them. Limit: a template that deletes characters *inside* a string could join what
a mark keeps apart only by deleting the mark's digits one by one; none does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weft.common.errors import InvalidRequest
from weft.text.private import secret_digits
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer, check_text

ROLES = ("system", "developer", "user", "assistant")
MAX_MESSAGES = 10_000
_NOT_BUILT = (
    "tool_calls",
    "tool_call_id",
    "function_call",
    "audio",
    "refusal",
    "annotations",
    "reasoning_content",
    "reasoning",
)
"""Fields clients send back with nothing in them; with a value they are refused."""
# fmt: off
_RESERVED = frozenset((
    "messages", "tokenize", "chat_template", "template", "add_generation_prompt", "continue_final_message",
    "tools", "documents", "return_dict", "return_tensors", "conversation", "raise_exception",
    "strftime_now", "range", "dict", "namespace", "cycler", "joiner", "loop", "self", "context",
    "environment",
))
# fmt: on
_PROBE = "7f3c9b0e5d"


class ChatPrompt(msgspec.Struct, frozen=True):
    """A rendered conversation."""

    ids: list[int]
    text: str
    """As the template wrote it, user text included."""


class ChatFormat:
    """How a model wants conversations: its template and its tokenizer. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, template: str | None = None, *, allow_request_template: bool = False
    ) -> None:
        """``template`` overrides the checkpoint's. A template that does not compile is reported when used."""
        self._tokenizer = tokenizer
        self._source = template if template is not None else tokenizer.files.chat_template
        self._allow_request_template = allow_request_template
        self._template: ChatTemplate | InvalidRequest | None = None
        if self._source is not None:
            try:
                self._template = ChatTemplate(self._source)
            except InvalidRequest as error:
                self._template = error
        self._marks = _Marks(tuple(tokenizer.special))

    @property
    def source(self) -> str | None:
        """The template's source, if there is one."""
        return self._source

    @property
    def problem(self) -> str | None:
        """Why the template cannot be used, if there is one and it does not compile."""
        return self._template.message if isinstance(self._template, InvalidRequest) else None

    def encode(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Any = None,
        chat_template: str | None = None,
        limit: int | None = None,
    ) -> ChatPrompt:
        """Ids and text of a conversation. ``kwargs`` are variables for the template, ``limit`` is the most
        tokens that are of use (TooManyTokens beyond it, see ``Tokenizer.encode_private``).

        Raises InvalidRequest, naming the parameter, for messages or variables that cannot be used, a
        template that fails or is missing, and a ``chat_template`` where those are not allowed.
        """
        template = self._choose(chat_template)
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt to be false",
                param="continue_final_message",
            )
        mark = secret_digits()
        checked = check_messages(messages)
        conversation = [self._for_template(message, template, mark) for message in checked]
        tail = secret_digits() + " "
        if continue_final_message:
            _append(conversation[-1], tail)
        variables = {
            **self._named(),
            **{key: self._marks.inside(value, mark) for key, value in check_kwargs(kwargs).items()},
            "messages": conversation,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        rendered = template.render(variables)
        if continue_final_message:
            rendered = _cut(rendered, tail)
        private = self._marks.rewrite(rendered, mark, self._tokenizer.private_name)
        ids = self._tokenizer.encode_private(private, add_special_tokens=False, limit=limit)
        return ChatPrompt(ids, rendered.replace(mark, ""))

    def end_of_turn(self) -> int | None:
        """Id of the added token that the template writes after an assistant's message, if it does.

        Where a template marks only the start of messages, that is the next role's token: it ends a turn too.
        """
        if not isinstance(self._template, ChatTemplate):
            return None
        turns = [("user", "u"), ("assistant", _PROBE), ("user", "u")]
        part = self._template.wants_parts
        conversation = [
            {"role": role, "content": [{"type": "text", "text": text}] if part else text}
            for role, text in turns
        ]
        variables = {
            "messages": conversation,
            "add_generation_prompt": False,
            "tools": None,
            "documents": None,
        }
        try:
            text = self._template.render({**self._named(), **variables})
        except InvalidRequest:
            return None
        _, _, after = text.rpartition(_PROBE)
        added = self._tokenizer.added
        found = _Marks(tuple(added)).find(after.lstrip())
        return None if found is None else added[found]

    def _choose(self, requested: str | None) -> ChatTemplate:
        if requested is not None:
            if not self._allow_request_template:
                raise InvalidRequest(
                    "this server does not take chat templates in requests", param="chat_template"
                )
            if not isinstance(requested, str):
                raise InvalidRequest("chat_template must be a string", param="chat_template")
            return ChatTemplate(requested)
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template; use a text completion or give one with --chat-template",
                param="messages",
            )
        if isinstance(self._template, InvalidRequest):
            raise self._template
        return self._template

    def _named(self) -> dict[str, Any]:
        files = self._tokenizer.files
        extra = {"additional_special_tokens": list(files.extra)} if files.extra else {}
        return {**files.named, **extra}

    def _for_template(self, message: Mapping[str, Any], template: ChatTemplate, mark: str) -> dict[str, Any]:
        role = message["role"]
        if role == "developer" and not template.names_developer:
            role = "system"  # what the template knows the same thing as
        result: dict[str, Any] = {"role": role}
        text = self._marks.around(message["content"], mark)
        result["content"] = [{"type": "text", "text": text}] if template.wants_parts else text
        if "name" in message:
            result["name"] = self._marks.around(message["name"], mark)
        return result


class _Marks:
    """Finds special tokens in strings and keeps user text from spelling them."""

    def __init__(self, special: tuple[str, ...]) -> None:
        self._special = special
        longest_first = sorted(special, key=lambda text: (-len(text), text))
        escaped = "|".join(map(re.escape, longest_first)) if special else "(?!)"
        self._any = re.compile(escaped)
        self._overlapping = re.compile(f"(?=(?:{escaped}))(.)", re.DOTALL)
        self._single = "".join(re.escape(text) for text in special if len(text) == 1)
        self._heads = frozenset(text[:cut] for text in special for cut in range(1, len(text)))
        self._tails = frozenset(text[cut:] for text in special for cut in range(1, len(text)))
        self._longest = max(map(len, special), default=0)

    def find(self, text: str) -> str | None:
        """The special token that ``text`` begins with."""
        match = self._any.match(text)
        return None if match is None else match[0]

    def inside(self, value: Any, mark: str) -> Any:
        """``value`` with a mark in every spelled special token of its strings, at any depth."""
        if isinstance(value, str):
            return (
                self._overlapping.sub(lambda found: found[1] + mark, value)
                if self._any.search(value)
                else value
            )
        if isinstance(value, list):
            return [self.inside(item, mark) for item in value]
        if isinstance(value, dict):
            return {self.inside(key, mark): self.inside(item, mark) for key, item in value.items()}
        return value

    def around(self, text: str, mark: str) -> str:
        """``text`` marked inside, and at an end that could become part of a special token."""
        reach = range(1, min(self._longest, len(text) + 1))
        within = len(text) < self._longest and any(text in special for special in self._special)
        before = within or any(text[:size] in self._tails for size in reach)
        after = within or any(text[-size:] in self._heads for size in reach)
        marked: str = self.inside(text, mark)
        if not text:
            return marked
        return (mark if before else "") + marked + (mark if after else "")

    def rewrite(self, rendered: str, mark: str, name: Any) -> str:
        """The template's special tokens by their private names, user text as it was."""
        if self._single:  # a token of one character is marked behind it, there being no inside
            pattern = re.compile(f"(?:{self._any.pattern})(?!(?<=[{self._single}]){mark})")
        else:
            pattern = self._any
        return pattern.sub(lambda match: name(match[0]), rendered).replace(mark, "")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as a list of {role, content: text[, name]}. Raises InvalidRequest for anything else."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest("messages must be a list that is not empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages holds more than {MAX_MESSAGES} messages", param="messages")
    return [_check_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object with role and content", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    result: dict[str, Any] = {"role": role}
    for key, value in message.items():
        if key == "role":
            continue
        if key == "content" and not (value is None and role == "assistant"):
            result["content"] = _content_text(value, f"{where}.content")
        elif key == "name" and (value is None or isinstance(value, str)):
            if value is not None:
                check_text(value, f"{where}.name")
                result["name"] = value
        elif value is None or (key in _NOT_BUILT and value in ([], "")):
            continue
        else:
            shown = key if isinstance(key, str) and re.fullmatch(r"\w{1,40}", key) else "a field"
            raise InvalidRequest(f"{where}.{shown} is not supported", param=f"{where}.{shown}")
    if "content" not in result:
        if role == "assistant":  # one that said nothing, as clients send it back
            return {**result, "content": ""}
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    return result


def _content_text(content: Any, where: str) -> str:
    """Text content, or the texts of a list of text parts in lines of their own."""
    if isinstance(content, str):
        check_text(content, where)
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where} must be a string or a list of text parts", param=where)
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f'{where} may hold only parts of the form {{"type": "text", "text": ...}}', param=where
            )
        check_text(text, where)
        texts.append(text)
    return "\n".join(texts)


def check_kwargs(kwargs: Any) -> dict[str, Any]:
    """Template variables of a request. Raises InvalidRequest for names that Weft or Jinja gives a meaning."""
    name = "chat_template_kwargs"
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise InvalidRequest(f"{name} must be an object", param=name)
    for key in kwargs:
        if not isinstance(key, str) or not key.isidentifier() or key.startswith("_") or len(key) > 64:
            raise InvalidRequest(f"{name} must have plain names", param=name)
        if key in _RESERVED or key.endswith("_token") or key.endswith("_tokens"):
            raise InvalidRequest(f"{name} cannot set {key}", param=name)
    try:
        checked: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(kwargs)))
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequest(f"{name} must hold plain JSON values", param=name) from None
    return checked


def _append(message: dict[str, Any], tail: str) -> None:
    if message["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message needs the last message to be the assistant's",
            param="continue_final_message",
        )
    if isinstance(message["content"], list):
        message["content"][-1]["text"] += tail
    else:
        message["content"] += tail


def _cut(rendered: str, tail: str) -> str:
    """The text up to where the last message ends; space there stays only if the template keeps it."""
    text, found, after = rendered.rpartition(tail.strip())
    if not found:
        raise InvalidRequest(
            "the chat template does not show the message to continue", param="continue_final_message"
        )
    return text if after.startswith(" ") else text.rstrip()
