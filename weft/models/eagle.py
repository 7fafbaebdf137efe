"""A model with an EAGLE-3 draft head. Source: Li et al. 2025, arXiv 2503.01840.

The head reads the residual stream before three layers of the model (low, middle, high) and the embedding of
the next token. Hidden states travel as [tokens, hidden + hidden of the head]: the input of the model's output
head, then the input of the draft head. For its further drafts the head reads its own stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import nn

from weft.attention.base import Backends, LayerCache, StepInput
from weft.attention.gqa.gqa import Attention, AttentionInput
from weft.common.errors import ConfigError
from weft.config.families.weight_files import weight_files
from weft.config.spec import ModelSpec
from weft.layers.build import Build, pack_all
from weft.layers.dense import GatedMLP, Linear, RMSNorm, TokenEmbedding
from weft.layers.rope import Rope
from weft.models.decoder import Model
from weft.models.files import WeightFile
from weft.models.loader import fill, fill_randomly
from weft.models.weights import WeightMap, add_attention, add_gated_mlp
from weft.ops.low_rank import AdapterRows
from weft.parallel.comm import Pending, reduced

Tensor = torch.Tensor
_TABLES = re.compile(r"^(d2t|t2d)$")


class EagleHead(nn.Module):
    """One layer with its own norms, and an output head over a part of the vocabulary."""

    def __init__(self, spec: ModelSpec, build: Build, *, embeds: bool) -> None:
        """``embeds``: the checkpoint has its own table of token embeddings."""
        super().__init__()
        eagle = spec.eagle
        assert eagle is not None
        self.spec, self.dtype, self.notes = build.local(spec), build.dtype, build.notes
        self._whole, self._before = spec, eagle.norm_before_residual
        hidden, eps = spec.hidden, spec.norm_eps
        table = TokenEmbedding(spec.vocab_size, hidden, build) if embeds else None
        self.embedding = table
        self.fc = Linear(len(eagle.layers) * hidden, hidden, build)
        self.embedding_norm = RMSNorm(hidden, eps, build)
        self.hidden_norm = RMSNorm(hidden, eps, build)
        self.attention = Attention(spec, 0, build, inputs=2 * hidden)
        self.feed_forward_norm = RMSNorm(hidden, eps, build)
        self.feed_forward = GatedMLP(hidden, spec.intermediate, spec.activation, build, bias=spec.mlp_bias)
        self.norm = RMSNorm(hidden, eps, build)
        self.head = Linear(hidden, eagle.vocab_size, build)
        self.comm = build.comm
        self._rope = Rope(spec.rope, build)
        self.ids: Tensor | None = None
        """int64 [vocabulary of the head]: the model's id of each id of the head; None for equal ids."""

    def steps(
        self,
        embedded: Tensor,
        stream: Tensor,
        step: StepInput,
        caches: LayerCache,
        backends: Backends,
        wanted: Tensor | None,
    ) -> Generator[Pending, None, Tensor]:
        """Return the stream after the layer, [L, hidden], of the rows ``wanted`` (int64 [L]; None: all)."""
        angles = self._rope.angles(step.positions, None)
        shared = AttentionInput(step=step, angles=angles, backends=backends)
        normed = self.hidden_norm(stream)
        x = torch.cat([self.embedding_norm(embedded), normed], dim=1)
        stream = normed if self._before else stream
        partial = self.attention(x, shared, caches, wanted)
        if wanted is not None:
            stream = stream[wanted]
        delta = yield from reduced(self.comm, partial)
        stream, normed = self.feed_forward_norm.add(stream.clone(), delta)
        return stream + (yield from reduced(self.comm, self.feed_forward(normed)))

    def weights(self) -> WeightMap:
        """Return the map of the published names."""
        spec, made = self._whole, WeightMap()
        for theirs, ours in (
            ("fc", "fc"),
            ("lm_head", "head"),
            ("norm", "norm"),
            ("midlayer.input_layernorm", "embedding_norm"),
            ("midlayer.hidden_norm", "hidden_norm"),
            ("midlayer.post_attention_layernorm", "feed_forward_norm"),
            *((("embed_tokens", "embedding"),) if self.embedding is not None else ()),
        ):
            made.add(f"{theirs}.weight", f"{ours}.weight")
        add_attention(made, spec, 0, "midlayer.self_attn", "attention")
        add_gated_mlp(made, spec, "midlayer.mlp", "feed_forward")
        return made


class _Target(Protocol):
    """A model that shows its stream before each layer: a decoder, or a model of transformers."""

    def hidden(
        self,
        step: StepInput,
        kv: Sequence[LayerCache],
        backends: Backends,
        logits_indices: Tensor | None = None,
        done: Callable[[int], None] | None = None,
        see: Callable[[int, Tensor, Tensor | None], None] | None = None,
    ) -> Generator[Pending, None, Tensor]: ...

    def embed(self, step: StepInput) -> Generator[Pending, None, Tensor]: ...


class EagleModel(Model):
    """The model and its draft head. Everything except drafts is the model's own."""

    def __init__(self, target: Model, head: EagleHead) -> None:
        nn.Module.__init__(self)
        assert head.spec.eagle is not None
        self.target, self.draft = target, head
        self._shown = (cast(_Target, target),)
        self.spec, self.mesh = target.spec, target.mesh
        self.dtype, self.device, self.notes = target.dtype, target.device, target.notes
        # Drafts change no output, so only the model's own ops decide about invariance.
        self._ops = target._ops
        self.experts, self.vision, self.score = target.experts, target.vision, target.score
        self.adapters, self.routed_layers = target.adapters, target.routed_layers
        self._taps = head.spec.eagle.layers
        self._own = self.spec.hidden

    @property
    def varying(self) -> tuple[str, ...]:
        return self.target.varying

    @property
    def asking(self) -> tuple[str, ...]:
        return self.target.asking

    @property
    def width(self) -> int:
        return self._own + self.draft.spec.hidden

    @property
    def draft_ids(self) -> Tensor | None:
        return self.draft.ids

    def hidden(
        self,
        step: StepInput,
        kv: Sequence[LayerCache],
        backends: Backends,
        logits_indices: Tensor | None = None,
        done: Callable[[int], None] | None = None,
    ) -> Generator[Pending, None, Tensor]:
        """Return [L, width]: the model's hidden states, then the input of the draft head."""
        taken: dict[int, Tensor] = {}

        def see(layer: int, x: Tensor, delta: Tensor | None) -> None:
            if layer in self._taps:
                taken[layer] = x.clone() if delta is None else x + delta

        own = kv[: self.spec.layers]
        hidden = yield from self._shown[0].hidden(step, own, backends, logits_indices, done, see)
        stream = self.draft.fc(torch.cat([taken[layer] for layer in self._taps], dim=1))
        return torch.cat([hidden, stream if logits_indices is None else stream[logits_indices]], dim=1)

    def lookahead(
        self,
        step: StepInput,
        hidden: Tensor,
        kv: Sequence[LayerCache],
        backends: Backends,
        logits_indices: Tensor | None = None,
    ) -> Generator[Pending, None, Tensor]:
        table, stream = self.draft.embedding, hidden[:, self._own :].contiguous()
        if table is None:
            embedded = yield from self._shown[0].embed(step)
        else:
            embedded = yield from reduced(self.draft.comm, table(step.ids))
        caches = kv[self.spec.layers]
        out = yield from self.draft.steps(embedded, stream, step, caches, backends, logits_indices)
        return torch.cat([out.new_zeros(len(out), self._own), out], dim=1)

    def draft_logits(self, hidden: Tensor) -> Generator[Pending, None, Tensor]:
        yield from ()
        made: Tensor = self.draft.head(self.draft.norm(hidden[:, self._own :].contiguous()))
        return made

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Generator[Pending, None, Tensor]:
        return (yield from self.target.logits(hidden[:, : self._own].contiguous(), adapters))

    def classify(self, hidden: Tensor) -> Generator[Pending, None, Tensor]:
        return (yield from self.target.classify(hidden))


def load_eagle(
    folder: str, spec: ModelSpec, build: Build, load_format: str, seed: int, progress: bool
) -> EagleHead:
    """Load the draft head of ``folder`` and pack the weights. ``spec``: of the head (``draft_part``).

    Raises ConfigError for weights that do not fit.
    """
    files = [] if load_format == "dummy" else weight_files(Path(folder), load_format)
    names = set[str]()
    ids: Tensor | None = None
    for path in files:
        with WeightFile(path) as file:
            names.update(file.names())
            if "d2t" in file.names():
                ids = file.tensor("d2t").clone()
    head = EagleHead(spec, build, embeds="embed_tokens.weight" in names)
    if load_format == "dummy":
        fill_randomly(head, seed)
    else:
        weights = head.weights()
        weights.ignored += [_TABLES]
        fill(head, weights, files, spec.layers, progress)
    pack_all(head)
    assert spec.eagle is not None
    if ids is not None:
        # Published as the difference of the two ids.
        ids = (ids + torch.arange(len(ids))).to(build.device)
        if ids.shape != (spec.eagle.vocab_size,) or ids.min() < 0 or ids.max() >= spec.vocab_size:
            raise ConfigError(
                "--speculative-model: d2t does not map the draft vocabulary into the vocabulary",
                param="--speculative-model",
            )
        head.ids = ids
    elif spec.eagle.vocab_size != spec.vocab_size and load_format != "dummy":
        raise ConfigError(
            "--speculative-model: the checkpoint has a smaller vocabulary and no tensor d2t",
            param="--speculative-model",
        )
    return head
