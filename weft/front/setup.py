"""What reading requests takes: the same for the front's threads and for its read workers."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.config.front_section import FrontSection, template_variables
from weft.config.media import MediaFacts
from weft.config.media_section import MediaSection
from weft.config.resolved import EngineConfig
from weft.front.proofs import Grammars
from weft.front.reading import Reader
from weft.grammar.guarded import Backend, GuardedCompiler
from weft.grammar.service import Compile, GrammarService
from weft.media.pictures import Pictures
from weft.text.chat import image_rules
from weft.text.model import TextModel
from weft.text.submit import ModelLimits
from weft.types.grammar import Grammar

CHECKER = "llguidance"
"""Grammars are checked by it whatever compiles them at the heads: it needs no torch."""


class TextSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The text model, by its files and flags."""

    tokenizer: str
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    variables: dict[str, Any] = {}
    """Of the chat template, where a request sets none."""
    images: MediaFacts | None = None
    """None where the model takes none."""
    most_images: int = 0
    """Of a conversation."""

    @classmethod
    def of(cls, config: EngineConfig, section: FrontSection) -> TextSetup:
        """What a server's settings say."""
        return cls(
            tokenizer=str(config.tokenizer_path),
            chat_template=section.chat_template,
            tool_call_parser=section.tool_call_parser,
            reasoning_parser=section.reasoning_parser,
            variables=template_variables(section),
            images=None if config.spec.vision is None else config.spec.vision.media,
            most_images=config.media.limit_mm_per_prompt,
        )

    def load(self) -> TextModel:
        """Raises ConfigError."""
        images, hidden = image_rules(self.images, self.most_images)
        return TextModel.load(
            self.tokenizer,
            self.chat_template,
            self.tool_call_parser,
            self.reasoning_parser,
            default_chat_template_kwargs=self.variables,
            images=images,
            hidden=hidden,
        )


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The text model, and the arguments of ``Reader``."""

    text: TextSetup
    names: tuple[str, ...]
    limits: ModelLimits
    max_response_bytes: int
    keep_attribution: bool = False
    media: MediaSection = MediaSection()
    grammar_timeout: float = 10.0
    """Seconds in which a grammar must be compiled."""

    def reader(self, text: TextModel, grammars: Grammars | None = None, *, waits: bool = True) -> Reader:
        """A reader over ``text``. ``grammars``, ``waits``: see ``Reader``."""
        return Reader(
            text,
            self.names,
            self.limits,
            self.max_response_bytes,
            keep_attribution=self.keep_attribution,
            grammars=grammars,
            pictures=None if self.text.images is None else Pictures(self.text.images, self.media),
            waits=waits,
        )


class GrammarCheck:
    """Compiles grammars, to prove that they can be, in processes that start with the first one.
    Thread-safe."""

    def __init__(self, setup: Setup) -> None:
        limits = setup.limits
        backend = Backend(
            name=CHECKER,
            tokenizer=setup.text.tokenizer,
            vocab_size=limits.vocab_size,
            end_ids=tuple(limits.end_ids),
        )
        self._compiler = GuardedCompiler(lambda: backend, setup.grammar_timeout)
        self._service = GrammarService(self._compiler, timeout=setup.grammar_timeout)

    def submit(self, grammar: Grammar, client: int) -> Compile:
        """See ``GrammarService.submit``."""
        return self._service.submit(grammar, client)

    def close(self) -> None:
        """End the processes."""
        self._service.close()
        self._compiler.close()
