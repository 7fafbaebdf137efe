"""All text facts of one model in one place, loaded by the API server and ``LLM``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.common.errors import ConfigError, InvalidRequest
from weft.text.builtin import builtin_template
from weft.text.chat import ChatFormat
from weft.text.image_tokens import ImageRules
from weft.text.parsing.choose_parser import ModelHints, choose
from weft.text.parsing.output import ModelOutput
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer


class TextModel:
    """Tokenizer, conversation format, output format and ends of turn. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat, output: ModelOutput | None = None) -> None:
        """Without ``output``, nothing is separated in the model's output."""
        self.tokenizer = tokenizer
        self.chat = chat
        self.output = ModelOutput(None, {}) if output is None else output
        chat.call_format = self.output.declared
        self.end_ids: tuple[int, ...] = tuple(sorted({*tokenizer.eos_ids, *chat.ends_of_turn()}))
        """Every id at the end of a turn, from the tokenizer, the generation config and the chat template."""
        self.output.one_call = chat.one_call

    @classmethod
    def load(
        cls,
        folder: str | Path,
        chat_template: str | Path | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        *,
        default_chat_template_kwargs: Mapping[str, Any] | None = None,
        allow_request_template: bool = False,
        images: ImageRules | None = None,
        hidden: Sequence[int] = (),
    ) -> TextModel:
        """Read the text files of a checkpoint's folder and return the text model.

        ``chat_template`` is a file to use instead of the checkpoint's template. Without both, some models use
        a template of ``weft.text.builtin``. The parsers are names of ``weft.text.parsing.formats``, ``auto``
        (chosen by the model) or ``none``. See ``ChatFormat`` for
        ``images`` and ``Tokenizer`` for ``hidden``. Raises ConfigError for any unusable input.
        """
        tokenizer = Tokenizer.load(folder, hidden)
        source = None if chat_template is None else _read_template(chat_template)
        if source is None and tokenizer.files.chat_template is None:
            source = builtin_template(tokenizer.files.model_type)
        used = tokenizer.files.chat_template if source is None else source
        hints = ModelHints(
            template=used or "",
            added=frozenset(tokenizer.added),
            model_type=tokenizer.files.model_type,
            response_template=tokenizer.files.config.get("response_template"),
        )
        declared = choose(tool_call_parser, reasoning_parser, hints)
        output = ModelOutput(declared, tokenizer.special)
        try:
            chat = ChatFormat(
                tokenizer,
                source,
                allow_request_template=allow_request_template,
                default_kwargs=default_chat_template_kwargs,
                in_reasoning=output.in_reasoning,
                images=images,
            )
        except InvalidRequest as error:
            message = error.message.replace("chat_template_kwargs", "--default-chat-template-kwargs")
            raise ConfigError(message, param="default_chat_template_kwargs") from None
        return cls(tokenizer, chat, output)


def _read_template(path: str | Path) -> str:
    """Return the text of a template file.

    Raises ConfigError if the file is unreadable, empty, or does not compile.
    """
    try:
        source = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        raise ConfigError("--chat-template must name a readable text file", param="chat_template") from None
    if not source.strip():
        raise ConfigError("--chat-template names an empty file", param="chat_template")
    try:
        ChatTemplate(source)
    except InvalidRequest as error:
        raise ConfigError(f"--chat-template: {error.message}", param="chat_template") from None
    return source
