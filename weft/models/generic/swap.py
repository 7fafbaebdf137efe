"""Substitution: Weft's layers take the places of recognized modules, and every other tensor gets memory.

The result says which part of which parameter each tensor of the published model fills.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from weft.common.errors import ConfigError
from weft.layers.build import AdapterOptions, Build
from weft.layers.shard import Shard, whole
from weft.models.generic import experts as routed
from weft.models.generic import modules, recognition
from weft.models.generic.attention import Rotation, is_joined, rotation_of
from weft.models.generic.parallel import DIVIDED, WHOLE, HeadCut, division_of, style_of
from weft.models.generic.probe import PROBED_TOKENS, LayerFacts
from weft.models.generic.skeleton import base_of
from weft.models.weights import Read, in_halves, in_order, transposed


@dataclass(frozen=True, slots=True)
class Target:
    """Part of a parameter that one published tensor fills."""

    parameter: nn.Parameter
    index: tuple[int | slice, ...] = ()
    offset: float = 0.0
    read: Read | None = None
    """Transform of the published tensor, with the same number of elements; None for none."""


@dataclass(slots=True)
class Substitution:
    """Targets by tensor name of the published model, and counts of recognized modules."""

    targets: dict[str, Target] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    loops: list[str] = field(default_factory=list)
    """Experts modules that stay as published: a loop that reads values on the host."""
    rotations: list[tuple[Any, Rotation]] = field(default_factory=list)
    """Attention modules between whose matrices Weft's op can stand."""
    cuts: dict[int, HeadCut] = field(default_factory=dict)
    """The rank's heads by layer, if every rank has whole attention modules."""
    last_attention: str = ""
    """Name of the class of the last attention module."""


class Swapper:
    """Replaces the modules of one model on the meta device, once."""

    def __init__(
        self,
        model: Any,
        calls: list[LayerFacts],
        inputs: list[tuple[str, Any]],
        build: Build,
        sums: modules.Sums,
    ) -> None:
        """``inputs``: (name of a linear layer, its input) in the order of the probe.

        Only linear layers that are called once, with one row per token, take adapters.
        """
        self.model = model
        self.build = build
        self.sums = sums
        self.made = Substitution()
        self._inputs = inputs
        self._adapts = adapted_layers(inputs)
        self._plain = replace(build, adapters=AdapterOptions())
        """Build for layers that take no adapters: tables, and layers without one row per token."""
        self._ranks = build.comm.size
        self._base, _ = base_of(model)
        self._layers = {call.layer: call for call in calls if call.layer is not None}
        # One rank needs the plan, too: the rounding of rows must not depend on the number of ranks.
        self._plan, heads = division_of(model, calls)
        if self._ranks > 1 and not heads:
            self.made.cuts = {layer: self._cut(call) for layer, call in self._layers.items()}
        self._attention = {call.module for call in calls}
        self._wide = _kept_wide(model)
        self._uses = Counter(
            id(parameter) for part in model.modules() for parameter in part._parameters.values()
        )
        self._memory = dict[int, tuple[torch.Tensor, nn.Parameter]]()
        """Memory by id of a tensor on the meta device. Tied tensors share memory."""

    def swap(self, *, ops: bool) -> Substitution:
        """Replace what is recognized (nothing if ``ops`` is False), and give memory to the rest."""
        self.made.last_attention = self._layers[max(self._layers)].module
        if ops:
            # Weft's op writes the heads of its matrices, so the matrices must have the heads of the rank.
            rotations = (
                [] if self.made.cuts else list(self._rotations())
            )  # of published modules, before their parts are replaced
            self._head()
            for name, module in list(self.model.named_modules()):
                self._block(name, module)
            self._siblings()
            for name, module in list(self.model.named_modules()):
                if type(module) is nn.Linear:
                    self._linear(name, module)
            self.made.rotations = [found for found in rotations if is_joined(found[0])]
            if self.made.rotations:
                self.made.counts["rotation"] = len(self.made.rotations)
        self._rest()
        return self.made

    # --- what is replaced ---

    def _rotations(self) -> Iterator[tuple[Any, Rotation]]:
        """Yield the attention modules that Weft's op can compute, with facts."""
        for module in self.model.modules():
            facts = self._layers.get(getattr(module, "layer_idx", None) or 0)
            if facts is None or type(module).__name__ != facts.module or facts.v_dim != facts.dim:
                continue
            found = rotation_of(module, facts.dim)
            if found is not None:
                yield module, found

    def _block(self, name: str, module: nn.Module) -> None:
        """Replace a norm, a feed-forward block or experts."""
        if not self._present(name, module):
            return
        norm = recognition.norm_of(module)
        if norm is not None:
            self._norm(name, module, *norm)
            return
        mlp = recognition.mlp_of(module)
        if mlp is not None:
            self._mlp(name, module, *mlp)
        elif recognition.is_experts(module):
            gate = recognition.gate_of(module)
            if gate is not None:
                self._experts(name, module, gate)

    def _norm(self, name: str, module: Any, eps: float, centred: bool) -> None:
        swapped = modules.FlatNorm(len(module.weight), eps, self.build, wide=centred)
        self._put(name, swapped, "norm")
        self._fill(f"{name}.weight", swapped.inner.weight, offset=float(centred))

    def _mlp(self, name: str, module: Any, activation: str, bias: bool) -> None:
        down = module.down_proj
        hidden, size = down.out_features, down.in_features
        divided = self._style(f"{name}.down_proj") == "rowwise"
        inner = self.build.part(size) if divided else whole(size)
        build = self._build_of(*(f"{name}.{part}" for part, _ in module.named_children()))
        swapped = modules.FlatMLP(hidden, inner, activation, build, self.sums, bias=bias)
        self._put(name, swapped, "feed-forward block")
        rows = {"gate_proj": slice(0, size), "up_proj": slice(size, 2 * size)}
        first = rows if hasattr(module, "gate_proj") else {"gate_up_proj": slice(0, 2 * size)}
        for part, where in first.items():
            self._fill_linear(f"{name}.{part}", swapped.gate_up, where, bias=bias)
        self._fill_linear(f"{name}.down_proj", swapped.down, bias=bias)

    def _experts(self, name: str, module: Any, gate: Any) -> None:
        experts, hidden, size = recognition.expert_sizes(module)
        divides = self._style(f"{name}.down_proj") == "rowwise"
        inner = routed.part_of_experts(size, self.build, divides=divides)
        top_k = getattr(module.config, "num_experts_per_tok", None) or 1
        top_k = top_k if isinstance(top_k, int) else 1
        swapped = routed.RoutedExperts(
            experts, hidden, inner, top_k, gate, self.build, self.sums, bias=module.has_bias
        )
        self._put(name, swapped, "experts")
        turned = transposed if module.is_transposed else None
        halves = None if module.is_concatenated else in_halves
        self._fill(f"{name}.gate_up_proj", swapped.gate_up, read=in_order(turned, halves))
        self._fill(f"{name}.down_proj", swapped.down, read=turned)
        if swapped.gate_up_bias is not None and swapped.down_bias is not None:
            self._fill(f"{name}.gate_up_proj_bias", swapped.gate_up_bias, read=halves)
            self._fill(f"{name}.down_proj_bias", swapped.down_bias)

    def _head(self) -> None:
        """Replace the embedding and the head, if both are recognized."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        how = recognition.scale_of(embedding) if isinstance(embedding, nn.Module) else None
        if how is None or type(head) is not nn.Linear or embedding.weight.shape != head.weight.shape:
            return
        names = {id(module): name for name, module in self.model.named_modules()}
        theirs, other = names[id(embedding)], names[id(head)]
        # Transformers shares the parameter of tied tables.
        tied = head.weight is embedding.weight
        vocab, hidden = embedding.weight.shape
        table = modules.SharedEmbedding(vocab, hidden, self._plain, self.sums, tied=tied)
        bias = 0 if head.bias is None else vocab
        end = modules.SharedHead(table, self._plain, self.sums, tied=tied, bias=bias)
        if how == "embed_scale":
            table.scale = embedding.embed_scale.to(self.build.dtype)
        self._put(theirs, table, "embedding")
        self._put(other, end, "head")
        self._fill(f"{theirs}.weight", table.table.weight)
        if end.inner.weight is not None:
            self._fill(f"{other}.weight", end.inner.weight)
        if end.bias is not None:
            self._fill(f"{other}.bias", end.bias)

    def _siblings(self) -> None:
        """Join linear layers of one module with one input: queries, keys and values, for example."""
        groups = dict[tuple[str, int], list[str]]()
        for name, x in self._inputs:
            module = self._module(name)
            if type(module) is nn.Linear and not self._routes(name):
                groups.setdefault((name.rpartition(".")[0], id(x)), []).append(name)
        # Only layers that divide alike can be one matrix. A layer called twice has no single place.
        for names in groups.values():
            parts = [self.model.get_submodule(name) for name in names]
            biases = {part.bias is not None for part in parts}
            styles = {self._style(name) for name in names}
            if len(names) < 2 or len(set(names)) < len(names) or len(biases) > 1 or "rowwise" in styles:
                continue
            shards = [self._outputs(name, part) for name, part in zip(names, parts, strict=True)]
            build = self._build_of(*names)
            group = modules.Joined(parts[0].in_features, shards, build, self.sums, bias=biases.pop())
            begin = 0
            for number, (name, part) in enumerate(zip(names, parts, strict=True)):
                self._put(name, modules.JoinedPart(group, number), "joined linear layer")
                rows = slice(begin, begin + part.out_features)
                self._fill_linear(name, group.inner, rows, bias=part.bias is not None)
                begin += part.out_features

    def _linear(self, name: str, module: nn.Linear) -> None:
        if self._uses[id(module.weight)] > 1 or self._routes(name):
            return  # a tied matrix stays one tensor, and a router may read its weight
        bias = module.bias is not None
        swapped: modules.FlatLinear | modules.SummedLinear
        build = self._build_of(name)
        if self._style(name) == "rowwise":
            inputs = self._heads(name, module.in_features)
            swapped = modules.SummedLinear(inputs, module.out_features, build, self.sums, bias=bias)
        else:
            outputs = self._outputs(name, module)
            swapped = modules.FlatLinear(module.in_features, outputs, build, self.sums, bias=bias)
        self._put(name, swapped, "linear layer")
        self._fill_linear(name, swapped.inner, bias=bias)

    def _build_of(self, *names: str) -> Build:
        """Return the build for the linear layers ``names``: without adapters if one layer takes none."""
        linear = [name for name in names if type(self._module(name)) is nn.Linear]
        return self.build if self._adapts.issuperset(linear) else self._plain

    # --- ranks ---

    def _cut(self, facts: LayerFacts) -> HeadCut:
        """Return this rank's heads of a layer. Raises ConfigError if ranks cannot have equal numbers."""
        heads, kv_heads, ranks = facts.heads, facts.kv_heads, self._ranks
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            raise ConfigError(
                f"--tensor-parallel-size {ranks} does not divide the {heads} heads and {kv_heads} KV heads "
                f"of layer {facts.layer}; use --tensor-parallel-size 1",
                param="--tensor-parallel-size",
            )
        mine, kv = (part.spans[0] for part in (self.build.part(heads), self.build.kv_part(kv_heads)))
        return HeadCut(slice(*mine), slice(*kv), heads)

    def _style(self, name: str) -> str | None:
        """Return the style of the plan for the module ``name``; None if every rank has all of the module."""
        style = style_of(self._plan, name.removeprefix(f"{self._base}."))
        return style if style in DIVIDED else None

    def _outputs(self, name: str, module: nn.Linear) -> Shard:
        if self._style(name) != "colwise":
            return whole(module.out_features)
        return self._heads(name, module.out_features)

    def _heads(self, name: str, size: int) -> Shard:
        """Return this rank's part of ``size`` columns, cut between heads inside attention."""
        if self._ranks == 1:
            return whole(size)
        parent, _, leaf = name.rpartition(".")
        layer = re.search(r"\.(\d+)\.", name)
        facts = self._layers.get(int(layer[1])) if layer else None
        if facts is None or type(self.model.get_submodule(parent)).__name__ not in self._attention:
            return self.build.part(size)
        if leaf in ("k_proj", "v_proj"):
            return self.build.kv_part(facts.kv_heads).times(size // facts.kv_heads)
        return self.build.part(facts.heads).times(size // facts.heads)

    # --- the rest ---

    def _rest(self) -> None:
        """Give memory to parameters and persistent buffers that were not replaced. Note loops of experts."""
        # Weft's layers inside a replaced module have memory already.
        ours = {id(part) for part in self.model.modules() if _is_ours(part) for part in part.modules()}
        for name, module in list(self.model.named_modules(remove_duplicate=False)):
            if id(module) in ours:
                continue
            if recognition.is_experts(module):
                self._loop(name, module)
            for key, tensor in list(_tensors(module)):
                full = f"{name}.{key}" if name else key
                divided = style_of(self._plan, full.removeprefix(f"{self._base}.")) not in {None, *WHOLE}
                if divided and self._ranks > 1:
                    raise ConfigError(
                        f"--tensor-parallel-size {self._ranks}: ranks cannot divide {full} of "
                        f"{type(self.model).__name__}; use --tensor-parallel-size 1",
                        param="--tensor-parallel-size",
                    )
                self._give_memory(full, module, key, tensor)

    def _loop(self, name: str, module: nn.Module) -> None:
        """Note experts that stay as published. Raise ConfigError if ranks should have whole experts."""
        if self.build.divides_experts:
            raise ConfigError(
                f"--enable-expert-parallel: Weft's op does not compute {name} ({type(module).__name__}), so "
                "every rank needs all of its experts; remove --enable-expert-parallel",
                param="--enable-expert-parallel",
            )
        self.made.loops.append(type(module).__name__)

    def _give_memory(self, full: str, module: nn.Module, key: str, tensor: torch.Tensor) -> None:
        """Replace a tensor on the meta device by a parameter with memory, of which all ranks have all."""
        build = self.build
        known = self._memory.get(id(tensor))
        if known is not None:
            made = known[1]
        elif tensor.is_floating_point():
            made = build.weight(*tensor.shape, wide=any(one in full for one in self._wide))
        else:
            made = nn.Parameter(torch.empty_like(tensor, device=build.device), requires_grad=False)
        if known is None:
            self._memory[id(tensor)] = (tensor, made)  # the tensor stays alive, so the id stays unique
            self._fill(full, made)
        module._buffers.pop(key, None)
        module._parameters.pop(key, None)
        module.register_parameter(key, made)

    # --- helpers ---

    def _put(self, name: str, swapped: nn.Module, what: str) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(parent), leaf, swapped)
        self.made.counts[what] += 1

    def _fill(
        self, name: str, parameter: nn.Parameter, *index: slice, offset: float = 0.0, read: Read | None = None
    ) -> None:
        self.made.targets[name] = Target(parameter, index, offset, read)

    def _fill_linear(self, name: str, layer: Any, *index: slice, bias: bool) -> None:
        self._fill(f"{name}.weight", layer.weight, *index)
        if bias:
            self._fill(f"{name}.bias", layer.bias, *index)

    def _module(self, name: str) -> nn.Module | None:
        try:
            return self.model.get_submodule(name)
        except AttributeError:
            return None

    def _present(self, name: str, module: nn.Module) -> bool:
        """Return True if ``module`` still stands at ``name``: no block around it was replaced."""
        return bool(name) and self._module(name) is module

    def _routes(self, name: str) -> bool:
        """Return True for a router: a linear layer beside experts, or alone in a module beside experts.

        Routers stay plain, because rounding would choose other experts.
        """
        above = name.rpartition(".")[0]
        parent = self.model.get_submodule(above)
        if len(list(parent.modules())) == 2:
            parent = self.model.get_submodule(above.rpartition(".")[0])
        return any("experts" in child for child, _ in parent.named_children() if "shared" not in child)


def adapted_layers(inputs: list[tuple[str, Any]]) -> set[str]:
    """Return the names of linear layers with exactly one call, for one row per token.

    ``inputs``: (name, input) of each call in the probe.
    """
    counts = Counter(name for name, _ in inputs)
    rows = {name: [n for n in x.shape[:-1] if n != 1] for name, x in inputs if isinstance(x, torch.Tensor)}
    return {name for name, count in counts.items() if count == 1 and rows.get(name) == [PROBED_TOKENS]}


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__ in (modules.__name__, routed.__name__)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the direct parameters and persistent buffers of ``module``."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _kept_wide(model: Any) -> tuple[str, ...]:
    """Return parts of names of tensors that the family keeps in float32 for every model dtype."""
    return tuple({*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())})
