"""All text facts of one model in one place: what the front and ``LLM`` load."""

from __future__ import annotations

from pathlib import Path

from weft.common.errors import ConfigError, InvalidRequest
from weft.text.chat import ChatFormat
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer


class TextModel:
    """Tokenizer, conversation format and ends of turn. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        turn = chat.end_of_turn()
        self.end_ids: tuple[int, ...] = tuple(sorted({*tokenizer.eos_ids, *([] if turn is None else [turn])}))
        """Every id that ends a turn: of the tokenizer, the generation config and the chat template."""

    @classmethod
    def load(cls, folder: str | Path, chat_template: str | Path | None = None) -> TextModel:
        """Reads a checkpoint's folder; ``chat_template`` is a file that replaces its template.

        Raises ConfigError when either cannot be used.
        """
        tokenizer = Tokenizer.load(folder)
        source = None
        if chat_template is not None:
            try:
                source = Path(chat_template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                raise ConfigError(
                    "--chat-template must name a readable text file", param="chat_template"
                ) from None
            try:
                ChatTemplate(source)
            except InvalidRequest as error:
                raise ConfigError(f"--chat-template: {error.message}", param="chat_template") from None
        return cls(tokenizer, ChatFormat(tokenizer, source))
