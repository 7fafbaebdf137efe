"""Messages to a prompt: validation, the template, and special tokens that only the template can write.

How user text is kept from becoming control tokens, although template and text end up in one string:

1. In every string of the request, wherever a special token is spelled, a *mark* (random digits, new for each
   rendering) goes in behind its first character. A string that begins or ends with a piece of a special
   token is a ``Word``, which is written with marks around it, so that two strings, or a string and the
   template, cannot make one together. Comparisons see the plain word.
2. The template is rendered. Special tokens found in the result are the template's own; they are rewritten to
   the private names of ``private.py``. Then the marks are taken out.
3. One pass of the private encoder makes the ids, as if the original tokenizer had seen the whole string.

Strings that hold nothing like a special token, which is nearly all of them, are not touched, so what a
template asks of them (``in``, ``split``, ``trim``) has its usual answer. Roles are a closed list, because
templates build tokens from them. Limit: a template that deletes characters *inside* a string could join what
a mark keeps apart only by deleting the mark's digits one by one; none does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from weft.common.errors import InvalidRequest
from weft.config.media import MediaFacts
from weft.text.arrange import RoleOrder, arranged
from weft.text.conversation import conversation_of, tool_objects
from weft.text.forms import PROBE_TOOLS, TemplateForm, find_ends, find_form
from weft.text.limits import MAX_SECONDS
from weft.text.marks import Marks
from weft.text.messages import Message, ShownPart, Shows, check_messages
from weft.text.parsing.parser import Tool
from weft.text.private import secret_digits
from weft.text.template import TOO_EXPENSIVE, ChatTemplate
from weft.text.tokenizer import Tokenizer
from weft.text.video import VideoPart, group_times

# fmt: off
_RESERVED = frozenset((
    "messages", "tokenize", "chat_template", "template", "add_generation_prompt", "continue_final_message",
    "tools", "documents", "return_dict", "return_tensors", "conversation", "raise_exception",
    "strftime_now", "range", "dict", "namespace", "cycler", "joiner", "loop", "self", "context",
    "environment",
))
# fmt: on


class ChatPrompt(msgspec.Struct, frozen=True):
    """A rendered conversation."""

    ids: list[int]
    text: str
    """As the template wrote it, user text included."""
    in_reasoning: bool = False
    """Whether the prompt ends inside a thought, which the output goes on with."""
    shown: tuple[ShownPart, ...] = ()
    """Images and videos in the order of their placeholders in ``ids``: one for each image, and for each
    group of a video's frames. See ``expanded``."""


class ImageRules(NamedTuple):
    """What a conversation's images and videos become."""

    placeholder: int
    """The token that the template writes for an image."""
    shows: Shows
    video: int = 0
    """The token that it writes for a video, where there may be any."""
    start: int = 0
    end: int = 0
    """What is written around each group of frames."""
    fps: float = 2.0
    """Of a video that does not say it."""


def image_rules(facts: MediaFacts | None, most: int) -> tuple[ImageRules | None, list[int]]:
    """(what ``ChatFormat`` needs, ids that no text may become): what stands for an image, or is around it."""
    if facts is None:
        return None, []
    tokens = (facts.placeholder, facts.video, facts.start, facts.end)
    hidden = [token for token in tokens if token is not None]
    if facts.frames is None or facts.video is None or facts.start is None or facts.end is None:
        return ImageRules(facts.placeholder, Shows(most)), hidden
    rules = ImageRules(
        facts.placeholder,
        Shows(most, facts.temporal),
        video=facts.video,
        start=facts.start,
        end=facts.end,
        fps=facts.frames.fps,
    )
    return rules, hidden


class ChatFormat:
    """How a model wants conversations: its template and its tokenizer. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        *,
        allow_request_template: bool = False,
        default_kwargs: Mapping[str, Any] | None = None,
        in_thought: Callable[[str, str], bool] | None = None,
        images: ImageRules | None = None,
    ) -> None:
        """``template`` overrides the checkpoint's. A template that does not compile is reported when used.

        ``default_kwargs`` are variables for the template where a request sets none of the name.
        ``in_thought`` says of a prompt, and of the message that the output continues (or ""), whether the
        output begins inside a thought. ``images``: None where the model takes none.
        """
        self._images = images
        self._tokenizer = tokenizer
        self._source = template if template is not None else tokenizer.files.chat_template
        self._allow_request_template = allow_request_template
        self._default_kwargs = check_kwargs(default_kwargs)
        self._in_thought = in_thought
        self._form: TemplateForm | None = None
        self._template: ChatTemplate | InvalidRequest | None = None
        if self._source is not None:
            try:
                self._template = ChatTemplate(self._source)
            except InvalidRequest as error:
                self._template = error
        self._marks = Marks(tuple(tokenizer.special))
        self._order = self._own_order()

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
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Any = None,
        chat_template: str | None = None,
        limit: int | None = None,
    ) -> ChatPrompt:
        """Ids and text of a conversation (of a request, or of ``Message``). ``tools`` are shown to the model,
        ``kwargs`` are variables for the template, ``limit`` is the most tokens that are of use
        (TooManyTokens beyond it, see ``Tokenizer.encode_private``).

        Raises InvalidRequest, naming the parameter, for messages or variables that cannot be used, a
        template that fails, is missing or knows no tools, and a ``chat_template`` where those are not
        allowed.
        """
        template = self._choose(chat_template)
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt to be false",
                param="continue_final_message",
            )
        if tools and not template.uses_tools:
            raise InvalidRequest(
                "the model's chat template knows no tools; send the request without tools, or give the "
                "server a template that has them with --chat-template",
                param="tools",
            )
        mark = secret_digits()
        form = self._form_of(template)
        checked = arranged(self._checked(messages, template), self._order_of(template, form))
        conversation = conversation_of(checked, template, form, self._marks, mark)
        tail = secret_digits() + " "
        if continue_final_message:
            _append(conversation[-1], tail)
        extra = {**self._default_kwargs, **check_kwargs(kwargs)}
        variables = {
            **self._named(),
            **{key: self._marks.inside(value, mark) for key, value in extra.items()},
            "messages": conversation,
            "add_generation_prompt": add_generation_prompt,
            "tools": self._marks.everywhere(tool_objects(tools, form), mark) if tools else None,
            "documents": None,
        }
        rendered = template.render(variables)
        if continue_final_message:
            rendered = _cut(rendered, tail)
        shown = tuple(part for message in checked for part in message.shown)
        rendered = self._with_groups(rendered, mark, shown)
        private = self._marks.rewrite(rendered, mark, self._tokenizer.private_name)
        ids = self._tokenizer.encode_private(private, add_special_tokens=False, limit=limit)
        text = rendered.replace(mark, "")
        last = checked[-1].text() if continue_final_message else ""
        in_thought = (add_generation_prompt or continue_final_message) and self._thinks(text, last)
        self._check_shown(shown, ids)
        return ChatPrompt(ids, text, in_thought, shown)

    @property
    def order(self) -> RoleOrder | None:
        """The order of roles that the model's template shows; None without a template."""
        return self._order

    def _order_of(self, template: ChatTemplate, form: TemplateForm) -> RoleOrder:
        if self._order is not None and template is self._template:
            return self._order
        return RoleOrder(lambda messages: self._plain(messages, template, form))

    def _own_order(self) -> RoleOrder | None:
        template = self._template
        if not isinstance(template, ChatTemplate):
            return None
        return RoleOrder(lambda messages: self._plain(messages, template, self._form_of(template)))

    def _plain(self, messages: Sequence[Message], template: ChatTemplate, form: TemplateForm) -> str:
        """The text of messages that hold nothing like a special token."""
        conversation = conversation_of(messages, template, form, self._marks, secret_digits())
        variables = {
            **self._named(),
            "messages": conversation,
            "add_generation_prompt": True,
            "documents": None,
        }
        try:
            return template.render({**variables, "tools": None})
        except InvalidRequest as error:
            if not template.uses_tools or error.error_code == TOO_EXPENSIVE:
                raise
            return template.render({**variables, "tools": PROBE_TOOLS})  # some templates fail without tools

    def _thinks(self, prompt: str, last: str) -> bool:
        """Whether ``prompt``, whose last message holds ``last`` where it is continued, ends in a thought."""
        return self._in_thought is not None and self._in_thought(prompt, last)

    def _checked(self, messages: Any, template: ChatTemplate) -> list[Message]:
        if isinstance(messages, list) and bool(messages) and isinstance(messages[0], Message):
            return messages
        checked = check_messages(messages, None if self._images is None else self._images.shows)
        if not template.takes_parts and (shown := [one for each in checked for one in each.shown]):
            raise _not_shown(shown[0])
        return checked

    def _with_groups(self, rendered: str, mark: str, shown: Sequence[ShownPart]) -> str:
        """What the template made, with each video's placeholder replaced by those of its groups of frames:
        the time, and a placeholder between what begins and ends an image. What the template wrote around
        the placeholder stays, as it does in the reference.
        """
        videos = [part for part in shown if isinstance(part, VideoPart)]
        rules = self._images
        if not videos or rules is None:
            return rendered
        video, start, end = (self._tokenizer.token_text(one) for one in (rules.video, rules.start, rules.end))
        pieces = rendered.split(video) if video and start and end else []
        if len(pieces) != 1 + len(videos):
            raise _not_shown(videos[0])
        made = [pieces[0]]
        for part, after in zip(videos, pieces[1:], strict=True):
            times = group_times(part, rules.shows.group, rules.fps)
            made += [f"<{time:.1f} seconds>{start}{video}{end}" for time in times]
            made.append(after)
        return "".join(made)

    def _check_shown(self, shown: Sequence[ShownPart], ids: list[int]) -> None:
        """Raises InvalidRequest where ``ids`` do not show each image and group of frames once, in order."""
        rules = self._images
        if not shown:
            return
        if rules is None:
            raise _not_shown(shown[0])
        wanted: list[int] = []
        for part in shown:
            if isinstance(part, VideoPart):
                wanted += [rules.video] * part.groups(rules.shows.group)
            else:
                wanted.append(rules.placeholder)
        placeholders = (rules.placeholder, rules.video) if rules.shows.group else (rules.placeholder,)
        if [token for token in ids if token in placeholders] != wanted:
            raise _not_shown(shown[0])

    def _form_of(self, template: ChatTemplate) -> TemplateForm:
        """The forms that ``template`` reads; found out once for the checkpoint's own."""
        if template is not self._template:
            return find_form(template, self._named(), MAX_SECONDS)  # a request's own gets no more time
        if self._form is None:
            self._form = find_form(template, self._named())
        return self._form

    def ends_of_turn(self) -> set[int]:
        """Ids of the added tokens that the template writes behind a whole turn of the assistant.

        Where a template marks only the start of messages, the next role's token ends a turn.
        """
        if not isinstance(self._template, ChatTemplate):
            return set()
        added = self._tokenizer.added
        known = {text for text, token in added.items() if token in self._tokenizer.eos_ids}
        try:
            form = self._form_of(self._template)
            found = find_ends(self._template, self._named(), form, tuple(added), known)
        except InvalidRequest as error:  # the template would take as long for every conversation
            self._template = error
            return set()
        return {added[text] for text in found}

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


def expanded(
    ids: Sequence[int], placeholders: Collection[int], counts: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(ids, starts): each placeholder in ``ids`` as often as ``counts`` says, and where each begins then."""
    made: list[int] = []
    starts: list[int] = []
    for token in ids:
        if token in placeholders:
            starts.append(len(made))
            made.extend([token] * counts[len(starts) - 1])
        else:
            made.append(token)
    return made, starts


def _not_shown(part: ShownPart) -> InvalidRequest:
    kind = "videos" if isinstance(part, VideoPart) else "images"
    return InvalidRequest(
        f"{part.where}: the model's chat template does not show the {kind} of this conversation",
        param=part.where,
        code="unsupported_parameter",
    )


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
    content = message.get("content")
    if isinstance(content, list):
        content[-1]["text"] += tail
    else:
        message["content"] = (content or "") + tail


def _cut(rendered: str, tail: str) -> str:
    """The text up to where the last message ends; space there stays only if the template keeps it."""
    text, found, after = rendered.rpartition(tail.strip())
    if not found:
        raise InvalidRequest(
            "the chat template does not show the message to continue", param="continue_final_message"
        )
    return text if after.startswith(" ") else text.rstrip()
