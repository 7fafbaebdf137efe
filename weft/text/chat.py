"""Convert messages to a prompt: validation, the template, and special tokens that only the template can
write.

User text and template text end up in one string. Three steps keep user text from becoming control tokens:

1. Each special token spelled in a string of the request gets a *mark* behind its first character. A mark is a
   string of random digits, new for each rendering. A string with a piece of a special token at the start or
   the end becomes a ``Word``. A ``Word`` is written with marks around, so that two strings, or a string and
   the template, cannot form a token together. Comparisons see the plain string.
2. The template is rendered. All special tokens in the result now come from the template. Each is replaced by
   its private name (``private.py``). Then the marks are removed.
3. The private encoder makes the ids in one pass, as the original tokenizer would for the whole string.

Strings without any similarity to a special token stay untouched: nearly all strings. Operations of the
template on these strings (``in``, ``split``, ``trim``) have the usual results. Roles are a closed list,
because templates build tokens from roles. Limit: a template that deletes characters *inside* a string could
join the two sides of a mark, but only by deleting the digits one by one. No known template does so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from weft.common.errors import InvalidRequest
from weft.text.chat_messages import ChatMessage, ShownPart, check_messages
from weft.text.conversation import RoleOrder, arranged, check_kwargs, conversation_of, tool_objects
from weft.text.forms import PROBE_TOOLS, TemplateForm, find_ends, find_form
from weft.text.image_tokens import ImageRules, with_images
from weft.text.images import VideoPart
from weft.text.limits import MAX_SECONDS
from weft.text.marks import Marks, secret_digits
from weft.text.parsing.declaration import OutputFormat
from weft.text.parsing.parser import Tool
from weft.text.template import TOO_EXPENSIVE, ChatTemplate
from weft.text.tokenizer import Tokenizer
from weft.text.videos import Choose, with_clips, with_groups


class ChatPrompt(msgspec.Struct, frozen=True):
    """A rendered conversation."""

    ids: list[int]
    text: str
    """The text of the template, including user text."""
    in_reasoning: bool = False
    """True if the prompt ends inside reasoning, which the output continues."""
    shown: tuple[ShownPart, ...] = ()
    """Images and videos in the order of their placeholders in ``ids``. ``ids`` has one placeholder per image
    and one per frame group of a video. See ``expanded``.
    """


class ChatFormat:
    """The conversation format of a model: template and tokenizer. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        *,
        allow_request_template: bool = False,
        default_kwargs: Mapping[str, Any] | None = None,
        in_reasoning: Callable[[str, str], bool] | None = None,
        images: ImageRules | None = None,
    ) -> None:
        """``template`` overrides the checkpoint's template.

        A template with a compile error is reported at first use.

        ``default_kwargs`` are template variables for requests without the same variable.
        ``in_reasoning(prompt, continued)`` returns True if the output starts inside reasoning. ``continued``
        is the message continued by the output, or "". ``images`` is None for a model without images. Raises
        InvalidRequest for invalid ``default_kwargs``.
        """
        self._images = images
        self._tokenizer = tokenizer
        self._source = template if template is not None else tokenizer.files.chat_template
        self._allow_request_template = allow_request_template
        self._default_kwargs = check_kwargs(default_kwargs)
        self._in_reasoning = in_reasoning or (lambda prompt, continued: False)
        self.call_format: OutputFormat | None = None
        """The model's format, for calls that the template does not show."""
        self._form: TemplateForm | None = None
        self._template: ChatTemplate | InvalidRequest | None = None
        if self._source is not None:
            try:
                self._template = ChatTemplate(self._source)
            except InvalidRequest as error:
                self._template = error
        # The template's text for a video is no token of some tokenizers. Users must not spell that text, too.
        own = "" if images is None else images.video_text
        self._marks = Marks(tuple(dict.fromkeys((*tokenizer.special, *([own] if own else [])))))
        self._order = self._own_order()

    @property
    def source(self) -> str | None:
        """Source of the template, or None."""
        return self._source

    @property
    def problem(self) -> str | None:
        """The reason why the template is unusable, or None. None also without a template."""
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
        choose: Choose | None = None,
    ) -> ChatPrompt:
        """Return ids and text of a conversation (request messages, or ``ChatMessage`` objects).

        ``tools`` are shown to the model. ``continue_final_message`` needs ``add_generation_prompt=False``.
        ``kwargs`` are template variables. ``choose`` chooses the frames of video files. A prompt with more
        than ``limit`` tokens raises TooManyTokens. Raises InvalidRequest, with the parameter's name, for
        invalid messages, variables, tools or combinations, and a missing, failing or forbidden template.
        """
        template = self._choose(chat_template)
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt to be false",
                param="continue_final_message",
            )
        if tools and not template.uses_tools:
            raise InvalidRequest(
                "the model's chat template does not support tools; leave tools out, or start the server with "
                "--chat-template and a template that supports tools",
                param="tools",
            )
        mark = secret_digits()
        form = self._form_of(template)
        checked = self._checked(messages, template, choose)
        checked = arranged(checked, self._order_of(template, form), form.one_call)
        conversation = conversation_of(checked, template, form, self._marks, mark)
        # The tail marks the end of the continued message in the rendered text; ``_cut`` removes the rest.
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
        rendered = self._with_groups(with_images(rendered, self._images, self._tokenizer), mark, shown)
        private = self._marks.rewrite(rendered, mark, self._private_name)
        ids = self._tokenizer.encode_private(private, add_special_tokens=False, limit=limit)
        text = rendered.replace(mark, "")
        last = checked[-1].text() if continue_final_message else ""
        in_reasoning = (add_generation_prompt or continue_final_message) and self._in_reasoning(text, last)
        self._check_shown(shown, ids)
        return ChatPrompt(ids, text, in_reasoning, shown)

    @property
    def order(self) -> RoleOrder | None:
        """The order of roles shown by the model's template; None without a usable template."""
        return self._order

    @property
    def one_call(self) -> bool:
        """True if the model's template is known to show one call per message."""
        return self._form is not None and self._form.one_call

    def _order_of(self, template: ChatTemplate, form: TemplateForm) -> RoleOrder:
        if self._order is not None and template is self._template:
            return self._order
        return RoleOrder(lambda messages: self._plain(messages, template, form))

    def _own_order(self) -> RoleOrder | None:
        """Return the order of roles of the model's template; None without a usable template."""
        template = self._template
        if not isinstance(template, ChatTemplate):
            return None
        return RoleOrder(lambda messages: self._plain(messages, template, self._form_of(template)))

    def _plain(self, messages: Sequence[ChatMessage], template: ChatTemplate, form: TemplateForm) -> str:
        """Return the rendered text of messages without any special token.

        Raises InvalidRequest if the template fails.
        """
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

    def _checked(self, messages: Any, template: ChatTemplate, choose: Choose | None) -> list[ChatMessage]:
        """Return checked messages, with chosen frames of video files. Raise InvalidRequest for images with a
        template without content parts."""
        if isinstance(messages, list) and bool(messages) and isinstance(messages[0], ChatMessage):
            return messages
        shows = None if self._images is None else self._images.shows
        checked = check_messages(messages, shows)
        if not template.takes_parts and (shown := [one for each in checked for one in each.shown]):
            raise _not_shown(shown[0])
        return with_clips(checked, shows, choose)

    def _with_groups(self, rendered: str, mark: str, shown: Sequence[ShownPart]) -> str:
        """Write the frame groups of all videos into ``rendered``, see ``with_groups``. Raises InvalidRequest
        if the template does not show each video once."""
        videos = [part for part in shown if isinstance(part, VideoPart)]
        rules = self._images
        if not videos or rules is None:
            return rendered
        used = (rules.shown_video, rules.video, rules.start, rules.end)
        texts = [self._tokenizer.token_text(one) or "" for one in used]
        texts[0] = rules.video_text or texts[0]
        if not (made := with_groups(rendered, videos, rules, texts)):
            raise _not_shown(videos[0])
        return made

    def _private_name(self, special: str) -> str:
        """Return the private name of a special token, or the template's text for a video unchanged."""
        if special not in self._tokenizer.special:
            return special
        return self._tokenizer.private_name(special)

    def _check_shown(self, shown: Sequence[ShownPart], ids: list[int]) -> None:
        """Raise InvalidRequest unless ``ids`` contain the placeholder of each image and frame group once, in
        order. Raise InvalidRequest for empty ``ids``.
        """
        if not ids:
            raise InvalidRequest(
                "the model's chat template makes an empty prompt of these messages; send other messages, or "
                "start the server with another --chat-template",
                param="messages",
            )
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
        # Any extra or missing placeholder would shift every later image.
        placeholders = (rules.placeholder, rules.video) if rules.shows.group else (rules.placeholder,)
        if [token for token in ids if token in placeholders] != wanted:
            raise _not_shown(shown[0])

    def _form_of(self, template: ChatTemplate) -> TemplateForm:
        """Return the message forms of ``template``.

        The forms of the model's template are cached. Raises InvalidRequest for too expensive probes.
        """
        if template is not self._template:
            return find_form(template, self._named(), MAX_SECONDS, self.call_format)
        if self._form is None:
            self._form = find_form(template, self._named(), spelled=self.call_format)
        return self._form

    def ends_of_turn(self) -> set[int]:
        """Return the ids of the added tokens that the template writes behind a complete turn of the
        assistant.

        The set is empty without a usable template. If a template marks only the start of messages, the token
        of the next role ends a turn. A template with too expensive probes is disabled: later requests receive
        the template's error.
        """
        if not isinstance(self._template, ChatTemplate):
            return set()
        added = self._tokenizer.added
        known = {text for text, token in added.items() if token in self._tokenizer.eos_ids}
        try:
            form = self._form_of(self._template)
            found = find_ends(self._template, self._named(), form, tuple(added), known)
        except InvalidRequest as error:  # too expensive: the template would fail for every conversation
            self._template = error
            return set()
        return {added[text] for text in found}

    def _choose(self, requested: str | None) -> ChatTemplate:
        """Return the template of the request, or else of the model.

        Raises InvalidRequest for a forbidden or invalid request template, and if the model has no usable
        template.
        """
        if requested is not None:
            if not self._allow_request_template:
                raise InvalidRequest(
                    "this server does not accept chat templates in requests; leave chat_template out",
                    param="chat_template",
                )
            if not isinstance(requested, str):
                raise InvalidRequest("chat_template must be a string", param="chat_template")
            return ChatTemplate(requested)
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template; use a text completion, or start the server with "
                "--chat-template",
                param="messages",
            )
        if isinstance(self._template, InvalidRequest):
            raise self._template
        return self._template

    def _named(self) -> dict[str, Any]:
        """Return the template variables of the special tokens."""
        files = self._tokenizer.files
        extra = {"additional_special_tokens": list(files.extra)} if files.extra else {}
        return {**files.variables, **files.named, **extra}


def _not_shown(part: ShownPart) -> InvalidRequest:
    """Return the error for an image or video that the template does not show."""
    kind = "videos" if isinstance(part, VideoPart) else "images"
    return InvalidRequest(
        f"{part.where}: the model's chat template does not show the {kind} of this conversation",
        param=part.where,
        code="unsupported_parameter",
    )


def _append(message: dict[str, Any], tail: str) -> None:
    """Append ``tail`` to the content of an assistant message, in place. Raise InvalidRequest for any other
    role."""
    if message["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message needs a last message of the role assistant",
            param="continue_final_message",
        )
    content = message.get("content")
    if isinstance(content, list):
        content[-1]["text"] += tail
    else:
        message["content"] = (content or "") + tail


def _cut(rendered: str, tail: str) -> str:
    """Return the text before the last ``tail``. White space at the end stays only if the template keeps
    trailing space. Raise InvalidRequest if ``rendered`` does not have ``tail``.
    """
    text, found, after = rendered.rpartition(tail.strip())
    if not found:
        raise InvalidRequest(
            "the chat template does not show the message to continue", param="continue_final_message"
        )
    return text if after.startswith(" ") else text.rstrip()
