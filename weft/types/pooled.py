"""Tasks without output tokens: embeddings, scores and classes of a checkpoint."""

from __future__ import annotations

from typing import Literal

import msgspec


class ClassifySpec(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs of a classification checkpoint for a prompt.

    The outputs come from the final hidden state of the last token: by the matrix ``score.weight``, or as the
    logits of chosen tokens.
    """

    names: tuple[str, ...]
    """Name of each output, in order."""
    problem: Literal["", "regression", "single", "multi"] = ""
    """Kind of problem: plain outputs (regression), one of the labels (single), or any of the labels (multi).
    "": as "multi" for one output, as "single" for several outputs."""
    tokens: tuple[int, ...] = ()
    """Token ids with the logits in use; () for ``score.weight``."""
    difference: bool = False
    """True for two tokens (no, yes) with one output: the logit of yes minus the logit of no."""
    instructed: bool = False
    """True for the prompt form of Qwen3-Reranker, with an instruction."""

    @property
    def labels(self) -> int:
        """Number of outputs for each prompt."""
        return len(self.names)


class PooledSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings of a checkpoint."""

    mode: Literal["last", "mean", "cls"] = "last"
    """Hidden state in use: of the last token, the mean of all tokens, or of the first token."""
    normalize: bool = True
    """True if vectors have length 1."""
    any_dimension: bool = False
    """True if the checkpoint allows vectors cut to any dimension."""
    dimensions: tuple[int, ...] = ()
    """Dimensions that the checkpoint allows besides its own."""
    refused: str = ""
    """Reason why embeddings of the checkpoint are not supported; "" if supported."""
