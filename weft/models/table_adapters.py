"""LoRA adapters of the embedding and of the output head on one rank: where the tensors go, and the copies.

    lora_embedding_A, lora_embedding_B       rows of the embedding
    lora_A, lora_B of the head               a linear layer with outputs divided over ranks
    weight, in ``modules_to_save``           a whole matrix; with --lora-saved-modules

A tied head shares the embedding's matrix, but an adapter changes only the module that the adapter names, as
in peft. With ``ensure_weight_tying`` the adapter changes both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from weft.config.adapter_files.tensors import AdapterModule, SavedMatrix
from weft.config.adapters import AdapterFile
from weft.layers.build import AdapterOptions
from weft.layers.dense import LMHead, TokenEmbedding
from weft.models.weights import WeightMap
from weft.ops import torch_ops

if TYPE_CHECKING:
    from weft.models.decoder import Model

Tensor = torch.Tensor


@dataclass(slots=True)
class HeldTables:
    """One adapter's parts in host memory, cut for this rank and padded to the rows of the layers."""

    rows: tuple[Tensor, Tensor] | None = None
    """Parts of the embedding: A by token id [rows, rank], and B [rank, hidden] with the scale."""
    head: tuple[Tensor, Tensor] | None = None
    """Parts of the head: A [rank, hidden], and B [rank, rows] with the scale."""
    lengths: Tensor | None = None
    """DoRA: lengths of the rows of the head, wide [vocabulary]."""
    factors: Tensor | None = None
    """DoRA: factors of the logits of this rank, wide [rows]."""
    table: Tensor | None = None
    """Whole embedding, [rows, hidden]."""
    matrix: Tensor | None = None
    """Whole head, [rows, hidden]."""

    @property
    def eager(self) -> bool:
        """True if steps with the adapter cannot be captured."""
        changed = (self.rows, self.table, self.matrix, self.lengths)
        return any(one is not None for one in changed)


@dataclass(slots=True)
class _Names:
    embedding: set[str] = field(default_factory=set)
    head: set[str] = field(default_factory=set)


class TableAdapters:
    """The adapters of embedding and head of a model."""

    def __init__(self, model: Model, weights: WeightMap, options: AdapterOptions) -> None:
        """Find both layers. Their memory exists already."""
        embedding, head = getattr(model, "embedding", None), getattr(model, "head", None)
        self._embedding = embedding if isinstance(embedding, TokenEmbedding) else None
        # Scores of a classifier read the head elsewhere, without the places of rows.
        plain = isinstance(head, LMHead) and model.spec.classify is None
        self._head = head if plain else None
        self._tied = model.spec.tied
        self._dtype = model.dtype
        self._saved = options.saved
        self._names = _Names()
        for name, placement in weights.placements.items():
            if placement.parameter == "embedding.weight":
                self._names.embedding.add(_leaf(name.removesuffix(".weight")))
            elif placement.parameter == "head.weight":
                self._names.head.add(_leaf(name.removesuffix(".weight")))
        for name, other in weights.same_as.items():
            if other in weights.placements and weights.placements[other].parameter == "embedding.weight":
                self._names.head.add(_leaf(name.removesuffix(".weight")))

    @property
    def nbytes(self) -> int:
        """Bytes of the places of both layers."""
        layers = (self._embedding, self._head)
        return sum(layer.low.nbytes for layer in layers if layer is not None and layer.low is not None)

    def _layer(self, module: str) -> TokenEmbedding | LMHead | None:
        """Return the layer with the published name ``module``; None for other names."""
        if "layers." in module:
            return None
        if self._embedding is not None and _leaf(module) in self._names.embedding:
            return self._embedding
        return self._head if _leaf(module) in self._names.head else None

    def takes(self, module: AdapterModule) -> bool:
        """Return True if the module is the embedding or the head, and the shape fits."""
        layer = self._layer(module.module)
        if layer is None or layer.low is None or (module.magnitude and isinstance(layer, TokenEmbedding)):
            return False
        vocab, hidden = self._shape(layer)
        shape = (hidden, vocab) if isinstance(layer, TokenEmbedding) else (vocab, hidden)
        return module.table == isinstance(layer, TokenEmbedding) and shape == (module.outputs, module.inputs)

    def why_not(self, saved: SavedMatrix) -> str | None:
        """Return the reason why a whole matrix is refused, or None."""
        layer = self._layer(saved.module)
        if layer is None or layer.low is None:
            able = "only an embedding or output head can be replaced"
            if self._embedding is None:
                able = "no matrix of this model can be replaced"
            return f"modules_to_save has {saved.module}, and {able}"
        if saved.shape != self._shape(layer):
            hint = ""
            if saved.shape[1:] == self._shape(layer)[1:]:
                hint = " (another vocabulary: resize the base model as in the training, and save the model)"
            return f"{saved.module} has shape {list(saved.shape)} instead of {list(self._shape(layer))}{hint}"
        if not self._saved:
            return f"modules_to_save has {saved.module}, which requires --lora-saved-modules"
        return None

    def _shape(self, layer: TokenEmbedding | LMHead) -> tuple[int, int]:
        """Return (tokens of the vocabulary, hidden size)."""
        assert self._embedding is not None
        assert layer.low is not None
        assert layer.low.low.pool is not None
        a, b = layer.low.low.pool.a, layer.low.low.pool.b
        hidden = b.shape[2] if isinstance(layer, TokenEmbedding) else a.shape[3]
        return self._embedding.shard.size, hidden

    def read(self, adapter: AdapterFile, tensors: Mapping[str, Tensor]) -> HeldTables:
        """Return the parts of ``adapter`` that concern both layers."""
        made = HeldTables()
        wide = torch_ops.wide(self._dtype)
        for module in adapter.modules:
            layer = self._layer(module.module)
            if layer is None:
                continue
            a, b = tensors[module.a].to(wide), tensors[module.b].to(wide) * module.scale
            if isinstance(layer, TokenEmbedding):
                made.rows = self._cut(a.T), b.T.to(self._dtype)
                if adapter.ties and self._tied and self._head is not None and made.head is None:
                    # The head of a tied adapter is the transposed embedding: W' = W + (B A).T
                    made.head = b.T.to(self._dtype), self._cut(a.T).T
            else:
                made.head = a.to(self._dtype), self._cut(b).T.contiguous()
                if module.magnitude:
                    made.lengths = tensors[module.magnitude].to(wide)
        for saved in adapter.saved:
            matrix = self._cut(tensors[saved.tensor].to(wide))
            if self._layer(saved.module) is self._embedding:
                made.table = matrix
            else:
                made.matrix = matrix
        if adapter.ties and self._tied and adapter.saved:
            made.table = made.matrix if made.table is None else made.table
            made.matrix = made.table if made.matrix is None and self._head is not None else made.matrix
        return made

    def finish(self, held: HeldTables) -> None:
        """Compute the factors of the logits of this rank, 1 for padding. Not beside a step."""
        if held.lengths is None:
            return
        assert self._embedding is not None
        assert self._head is not None
        assert self._head.low is not None
        assert held.head is not None
        lengths, (a, b) = held.lengths, held.head
        squares = self._head.low.low.squares(a.shape[1], a.unsqueeze(0), b)
        begin, end = self._embedding.shard.spans[0]
        made = torch.ones_like(squares)
        made[: end - begin] = lengths[begin:end].to(made.device) / squares[: end - begin].sqrt()
        held.factors = made

    def forget_squares(self) -> None:
        """Forget the lengths of the rows of the head. Call after the weights have changed."""
        if self._head is not None and self._head.low is not None:
            self._head.low.low.forget_squares()

    def _cut(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank of ``rows`` [vocabulary, n], padded with zeros as the layers are."""
        assert self._embedding is not None
        assert self._embedding.low is not None
        begin, end = self._embedding.shard.spans[0]
        made = torch.zeros(self._embedding.low.rows.shape[1], rows.shape[1], dtype=self._dtype)
        made[: end - begin] = rows[begin:end].to(self._dtype)
        return made

    def clear(self, place: int) -> None:
        """Remove the adapter of ``place``."""
        for layer in (self._embedding, self._head):
            if layer is not None and layer.low is not None:
                layer.low.clear(place)

    def place(self, held: HeldTables, place: int) -> None:
        """Copy ``held`` to the empty ``place``."""
        if held.rows is not None or held.table is not None:
            assert self._embedding is not None
            assert self._embedding.low is not None
            low = self._embedding.low
            low.changing.add(place)
            if held.rows is not None:
                assert low.low.pool is not None
                a, b = held.rows
                low.rows[place, :, : a.shape[1]].copy_(a)
                low.low.pool.b[place, : len(b)].copy_(b)
                low.low.pool.set_rank(place, len(b))
            if held.table is not None:
                assert low.whole is not None
                low.whole[place].copy_(held.table)
                low.replaced.add(place)
        if held.head is not None or held.matrix is not None:
            assert self._head is not None
            assert self._head.low is not None
            head = self._head.low
            if held.head is not None:
                assert head.low.pool is not None
                a, b = held.head
                head.low.pool.a[place, 0, : len(a)].copy_(a)
                head.low.pool.b[place, : len(b)].copy_(b)
                head.low.pool.set_rank(place, len(b))
            if held.factors is not None:
                assert head.low.pool is not None
                head.low.pool.factors[place] = held.factors
            if held.matrix is not None:
                head.replace(place, held.matrix)


def _leaf(module: str) -> str:
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    return module.rpartition(".")[2]
