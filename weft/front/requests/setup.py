"""Setup for reading requests, common to the API server's threads and to read workers."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.config.media import MediaFacts
from weft.config.resolved import EngineConfig
from weft.config.sections.front_section import FrontSection, template_variables
from weft.config.sections.media_section import MediaSection
from weft.front.requests.reading import Reader
from weft.grammar.guard.compile_jobs import Compile, GrammarService
from weft.grammar.guard.guarded import BackendArguments, GuardedCompiler
from weft.media.pictures import Pictures
from weft.text.image_tokens import image_rules
from weft.text.model import TextModel
from weft.text.scoring import Tasks
from weft.text.submit import ModelLimits
from weft.types.grammar import Grammar

CHECKER = "llguidance"
"""Backend for grammar checks, whatever backend the engines use: llguidance needs no torch."""


class TextSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Files and flags of the text model."""

    tokenizer: str
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    variables: dict[str, Any] = {}
    """Chat template variables for requests without their own."""
    images: MediaFacts | None = None
    """Image facts of the model; None for a model without images."""
    most_images: int = 0
    """Maximum images of a conversation."""

    @classmethod
    def of(cls, config: EngineConfig, section: FrontSection) -> TextSetup:
        """Return the text setup of a server's settings."""
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
        """Load and return the text model. Raises ConfigError for unusable files or parsers."""
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
    """The text model and the arguments of ``Reader``."""

    text: TextSetup
    names: tuple[str, ...]
    limits: ModelLimits
    max_response_bytes: int
    keep_attribution: bool = False
    media: MediaSection = MediaSection()
    tasks: Tasks = Tasks()
    grammar_timeout: float = 10.0
    """Maximum seconds for compiling a grammar."""

    def reader(self, text: TextModel) -> Reader:
        """Return a reader over ``text``."""
        return Reader(
            text,
            self.names,
            self.limits,
            self.max_response_bytes,
            keep_attribution=self.keep_attribution,
            pictures=None if self.text.images is None else Pictures(self.text.images, self.media),
            tasks=self.tasks,
        )


class GrammarCheck:
    """Checks grammars by compiling, in processes that start with the first grammar. Thread-safe."""

    def __init__(self, setup: Setup) -> None:
        """Prepare the compiler; processes start with the first grammar. ``setup`` gives the tokenizer, the
        vocabulary and the time limit."""
        limits = setup.limits
        backend = BackendArguments(
            name=CHECKER,
            tokenizer=setup.text.tokenizer,
            vocab_size=limits.vocab_size,
            end_ids=tuple(limits.end_ids),
        )
        self._compiler = GuardedCompiler(lambda: backend, setup.grammar_timeout)
        self._service = GrammarService(self._compiler, timeout=setup.grammar_timeout)

    def submit(self, grammar: Grammar, client: int) -> Compile:
        """Start a compile, see ``GrammarService.submit``."""
        return self._service.submit(grammar, client)

    def close(self) -> None:
        """End the processes."""
        self._service.close()
        self._compiler.close()
