"""Settings of speculative decoding; one of the sections (see ``sections``)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from weft.config.sections.parallel_section import Section


class SpeculationSection(Section, frozen=True, kw_only=True):
    """Speculative decoding. Drafts of later tokens are verified in one step, and never change the output."""

    speculative_method: Annotated[
        Literal["none", "mtp", "ngram", "draft", "eagle3"],
        Meta(
            description="Source of drafts. mtp: the model's own draft module. ngram: the tokens that "
            "followed an equal n-gram earlier in the prompt or output. draft: a smaller model "
            "(--speculative-model). eagle3: a trained draft head (--speculative-model)."
        ),
    ] = "none"
    speculative_model: Annotated[
        str | None,
        Meta(
            description="draft, eagle3: folder, hub name or bundled model that drafts. Its vocabulary must "
            "be the vocabulary of the model."
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int, Meta(ge=1, le=8, description="Maximum number of drafts per sequence and step.")
    ] = 3
    speculative_adaptive: Annotated[
        bool,
        Meta(description="Propose fewer drafts, or none, if the acceptance rate is too low to save time."),
    ] = True
    ngram_min_length: Annotated[
        int, Meta(ge=1, le=16, description="ngram: minimum number of matching tokens.")
    ] = 2
    ngram_max_length: Annotated[
        int,
        Meta(
            ge=1,
            le=16,
            description="ngram: maximum number of matching tokens. Longer matches are tried first.",
        ),
    ] = 4

    @property
    def drafts(self) -> int:
        """Maximum number of drafts per sequence and step; 0 without speculation."""
        return 0 if self.speculative_method == "none" else self.num_speculative_tokens
