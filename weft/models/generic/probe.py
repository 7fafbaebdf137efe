"""Facts of a model by a probe: one forward pass over three tokens without memory.

The pass records the calls of attention. Each layer must call attention exactly once, with a form that Weft's
caches and backends support. Every other form is refused by name.

    python -m weft.models.generic.probe FOLDER [LAYERS]     prints the result as JSON
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from weft.common.confine import confine
from weft.common.errors import ConfigError
from weft.config.families.generic.probing import Probed, memory_limit
from weft.config.parts.traits import ScaleSpec
from weft.config.spec import CacheSpec, CountedExperts, ModelSpec, RopeSpec
from weft.models.generic import reasons, recognition
from weft.models.generic.interface import AttentionCall, Distances, answered_by
from weft.models.generic.masks import FULL, Mask, make_mask
from weft.models.generic.own_attention import rounded_bias
from weft.models.generic.parallel import whole_weights
from weft.models.generic.skeleton import base_of, make_skeleton, read_config

Tensor = torch.Tensor
PROBED_TOKENS = 3
"""Tokens of the probe's pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """Facts of one attention call."""

    layer: int | None
    module: str
    """Name of the class of the attention module."""
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    window: int
    """0: all positions."""
    biased: bool = False
    """True for a bias by distance, which is in further dims of the keys."""
    softcap: float = 0.0
    """0: no softcap of scores."""
    sinks: bool = False
    problems: tuple[str, ...] = ()
    """Reasons against the layer."""


class Probe:
    """Receiver that records attention calls and computes nothing."""

    attends = True

    def __init__(self) -> None:
        self.calls: list[LayerFacts] = []

    def attend(self, call: AttentionCall) -> Tensor:
        biased = call.distances is not None
        call = call.with_distances(torch.zeros(call.q.shape[2], dtype=torch.int64))
        problems = [reasons.argument(name) for name in call.other]
        window = call.window or 0
        kind = FULL
        if call.mask is not None:
            kind = call.mask.kind if isinstance(call.mask, Mask) else "computed by the model"
        if kind.startswith("window:"):
            window = int(kind.removeprefix("window:"))
        elif kind != FULL:
            problems.append(reasons.mask(kind))
        elif call.mask is not None:
            window = 0  # the mask decides
        if call.v.shape[3] > call.q.shape[3]:
            problems.append(f"values of {call.v.shape[3]} dims, keys of {call.q.shape[3]}")
        if call.q.shape[0] != 1 or call.q.shape[2] != PROBED_TOKENS or call.k.shape[2] != PROBED_TOKENS:
            problems.append(f"keys of {call.k.shape[2]} positions for {PROBED_TOKENS} tokens")
        if call.q.shape[1] % call.k.shape[1]:
            problems.append(f"{call.k.shape[1]} KV heads for {call.q.shape[1]} heads")
        self.calls.append(
            LayerFacts(
                layer=getattr(call.module, "layer_idx", None),
                module=type(call.module).__name__,
                heads=call.q.shape[1],
                kv_heads=call.k.shape[1],
                dim=call.q.shape[3],
                v_dim=call.v.shape[3],
                window=window,
                biased=biased,
                softcap=call.softcap or 0.0,
                sinks=call.sinks is not None,
                problems=tuple(problems),
            )
        )
        return call.q.new_zeros(call.q.shape[0], call.q.shape[2], call.q.shape[1], call.v.shape[3])

    def route(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros_like(x)


class _NoReason(Exception):
    """The second pass failed, too."""


@torch.no_grad()
def run_probe(model: Any) -> list[LayerFacts]:
    """Return the attention calls of one forward pass of ``model`` (a skeleton), head included.

    Raises ConfigError if the pass reads values, or fails otherwise.
    """
    _refuse(model, reasons.cross_attention(model) + rounded_bias(model) + _moving_rope(model))
    # A mask of two dims: without a mask transformers reads the positions, which have no values here.
    seen = torch.ones(1, PROBED_TOKENS, dtype=torch.int64, device="meta")
    try:
        return _pass(model, seen)
    except Exception as error:  # modeling code raises many types
        failure = error
    # Models with a recurrent state read the mask. A finished mask and answered reads let the pass name the
    # layers without attention; such a pass knows no masks, so the model is refused in any case.
    with contextlib.suppress(_NoReason), torch.device("meta"), reasons.Answered():
        try:
            calls = _pass(model, make_mask(FULL))
        except Exception as error:
            raise _NoReason from error
        _by_layer(model, model.config.get_text_config().num_hidden_layers, calls)  # raises
    raise ConfigError(
        f"{type(model).__name__}: {reasons.unprobed(model, failure)}", param="--model"
    ) from failure


def _pass(model: Any, mask: Tensor) -> list[LayerFacts]:
    """Return the attention calls of one forward pass with ``mask``."""
    probe = Probe()
    ids = torch.zeros(1, PROBED_TOKENS, dtype=torch.int64, device="meta")
    with answered_by(probe):
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    return probe.calls


def _by_layer(model: Any, layers: int, calls: list[LayerFacts]) -> dict[int, LayerFacts]:
    """Return the call of each layer. Raises ConfigError that lists every problem of the model."""
    problems = list[str]()
    found = dict[int, LayerFacts]()
    # Every problem is collected, so that one error names all of them.
    for call in calls:
        if call.layer is None:
            problems.append(f"{call.module} has no layer number")
            continue
        if call.layer in found:
            problems.append("a layer attends twice, and a layer has one KV cache")
        found[call.layer] = call
        problems += call.problems
    missing = [n for n in range(layers) if n not in found]
    if missing:
        problems.append(reasons.without_attention(model, missing, layers))
    if any(n >= layers for n in found):
        problems.append(f"attention in layers beyond {layers}")
    _refuse(model, problems)
    return found


def _refuse(model: Any, problems: list[str]) -> None:
    """Raise ConfigError that lists ``problems``, if there are any."""
    if problems:
        raise ConfigError(
            f"{type(model).__name__} cannot be served with the implementation of transformers: "
            + "; ".join(dict.fromkeys(problems)),
            param="--model",
        )


def _moving_rope(model: Any) -> list[str]:
    """Return reasons against rotations that depend on the longest row of a step."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", 0) or 0
    found = list[str]()
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            trained = _trained_positions(config)
            if kind in ("dynamic", "longrope") and positions > trained:
                found.append(f"rope_type {kind!r} rotates by the longest row of a step")
    return found


def _trained_positions(config: Any) -> int:
    """Return the context length up to which a scaled rotation equals the unscaled one; 0 if unknown."""
    parameters = getattr(config, "rope_parameters", None) or {}
    stated = parameters.get("original_max_position_embeddings") if isinstance(parameters, dict) else None
    return stated or getattr(config, "original_max_position_embeddings", None) or 0


def spec_of(model: Any, calls: list[LayerFacts]) -> ModelSpec:
    """Return the spec of ``model`` (a skeleton) from its attention calls. Raises ConfigError."""
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    found = _by_layer(model, layers, calls)
    groups = dict[tuple[int, int, int], list[int]]()
    for layer in sorted(found):
        call = found[layer]
        groups.setdefault((call.window, call.kv_heads, call.dim), []).append(layer)
    caches = tuple(
        CacheSpec(
            kind="window" if window else "full",
            layers=tuple(members),
            window=window,
            kv_heads=kv_heads,
            head_dim=dim,
        )
        for (window, kv_heads, dim), members in groups.items()
    )
    positions = _positions(config)
    if any(call.biased for call in found.values()) and positions > Distances.LAST + 1:
        _refuse(
            model,
            [f"a bias by distance (ALiBi) with {positions} positions; the limit is {Distances.LAST + 1}"],
        )
    every_rank = whole_weights(model, list(found.values()))
    widest = max(found.values(), key=lambda call: call.heads * call.dim)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return ModelSpec(
        family="transformers",
        architecture=type(model).__name__,
        vocab_size=config.vocab_size,
        hidden=config.hidden_size,
        layers=layers,
        heads=widest.heads,
        kv_heads=widest.kv_heads,
        head_dim=widest.dim,
        intermediate=max(inner) if isinstance(inner, list | tuple) else inner,
        rope=RopeSpec(dim=widest.dim),
        tied=bool(getattr(model.config, "tie_word_embeddings", False)),
        caches=caches,
        sinks=any(call.sinks for call in found.values()),
        scales=ScaleSpec(attention_softcap=max(call.softcap for call in found.values())),
        max_position=positions,
        eos_ids=_ids(config, "eos_token_id"),
        bos_id=next(iter(_ids(config, "bos_token_id")), None),
        dtype="",
        counted=_counted(model),
        counted_whole=sum(weight.numel() for weight in every_rank),
        counted_experts=_counted_experts(model, {id(weight) for weight in every_rank}),
    )


def _positions(config: Any) -> int:
    """Return the context length in ``config``; 2048 if no field has the length."""
    names = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length")
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), 2048)


def _counted_experts(model: Any, every_rank: Collection[int]) -> CountedExperts | None:
    """Return the experts of ``model``; None for a model without experts. ``every_rank``: ids of parameters
    that every tensor parallel rank has."""
    found = [module for module in model.modules() if recognition.is_experts(module)]
    if not found:
        return None
    unknown = sorted({type(module).__name__ for module in found if recognition.gate_of(module) is None})
    numbers = sorted({len(next(module.parameters())) for module in found})
    reason = ""
    if unknown:
        reason = f"Weft's op does not compute the experts of {', '.join(unknown)}"
    elif len(numbers) > 1:
        reason = f"layers have different numbers of experts: {', '.join(map(str, numbers))}"
    weights = [weight for module in found for weight in module.parameters()]
    return CountedExperts(
        experts=numbers[0],
        elements=sum(weight.numel() for weight in weights),
        whole=sum(weight.numel() for weight in weights if id(weight) in every_rank),
        undivided=reason,
    )


def _counted(model: Any) -> int:
    """Return the number of parameters outside of the embedding and the head."""
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    without = {id(weight) for table in tables if table is not None for weight in table.parameters()}
    return sum(weight.numel() for weight in model.parameters() if id(weight) not in without)


def _ids(config: Any, name: str) -> tuple[int, ...]:
    """Return the token ids in field ``name``: a number, a list, or none."""
    value = getattr(config, name, None)
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(one for one in values if isinstance(one, int))


def probe_folder(folder: str, architecture: str, layers: int | None = None) -> ModelSpec:
    """Return the spec of the checkpoint in ``folder`` for the class ``architecture`` of transformers.

    ``dtype`` is empty, and ``head`` is True: the caller knows the files. Raises ConfigError for a model that
    cannot be served.
    """
    model = make_skeleton(read_config(folder, layers), architecture, torch.float32)
    base_of(model)
    return spec_of(model, run_probe(model))


def _lacks_memory(error: BaseException | None) -> bool:
    """Return True if ``error`` comes from a failed allocation. Torch reports one as a RuntimeError."""
    while error is not None:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def main(arguments: list[str]) -> None:
    """Print ``Probed`` as one line of JSON. Arguments: folder, architecture, number of layers or nothing.

    The process may allocate ``probing.memory_limit``.
    """
    confine(memory_limit())
    folder, architecture, *layers = arguments
    # Only the result may be on stdout: libraries print notes.
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        made = Probed(spec=probe_folder(folder, architecture, int(layers[0]) if layers else None))
    except ConfigError as error:
        made = Probed(refused=error.message, lacks_memory=_lacks_memory(error))
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        made = Probed(lacks_memory=True)
    os.write(out, msgspec.json.encode(made) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
