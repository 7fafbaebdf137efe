"""Kernels in Triton for CUDA devices. Importing registers the kernels; the first call imports Triton.

    fused            norms, rotary embedding with the cache write, gates
    matmul           a batch-invariant matrix product for ``--deterministic``
    coded            products with weights that stay packed
    words_linear     faster ones of linear layers on Hopper GPUs
    moe, routing     routed feed-forward blocks
    low_rank         adapters
    choice, sparse, indexed    scores and choice of an indexer, sparse attention, the indexer's small work
    scaled           products in FP8 by name
    streams          hyper-connections, rotation of neighbours
    draw             tokens from logits, for ``weft.ops.draw``
    eight_bits       KV cache entries in 8 bits inside kernels, and writes of whole lines
    attention, latent           paged attention, latent attention
    delta, mamba, causal        gated delta net, Mamba2, short convolution

The kernels compute float32, bfloat16 and float16; float64 stays on the torch implementations.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from weft.common.errors import ConfigError
from weft.ops.coded import INT8_DIVIDED, ROW_GROUPS
from weft.ops.registry import Implementation, register

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOPPER = 9
"""Major compute capability of the GPUs on which ``words`` was compiled without spilled registers."""
FAST, FALLBACK = 10, -1
"""Priorities above and below torch's implementations. FALLBACK is chosen only if invariance is required."""


@functools.cache
def interpreting() -> bool:
    """Return True if kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1, for tests)."""
    if importlib.util.find_spec("triton") is None:
        return False
    knobs = importlib.import_module("triton.knobs")
    return bool(knobs.runtime.interpret)


@functools.cache
def available() -> bool:
    """Return True if kernels can run in this process: Triton is installed and a CUDA device exists.

    Under the interpreter (tests) no device is needed.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.is_available() or interpreting()


def check_served(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if kernels cannot run on ``device``, or have no ``dtype``. ``backend``: kind and name
    for messages."""
    if device.type != "cuda" and not interpreting():
        raise ConfigError(f"{backend} does not run on {device.type}", param="--device")
    if not available():
        raise ConfigError(f"{backend} needs Triton: pip install 'weft[cuda]'", param="--attention-backend")
    if dtype not in DTYPES:
        raise ConfigError(f"{backend} has no {dtype}", param="--dtype")


def takes_codes(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if products on ``device`` with activations in ``dtype`` accept packed weights."""
    return device.type == "cuda" and dtype in DTYPES and available()


@functools.cache
def takes_words() -> bool:
    """Return True if products with matrices in words can run: on a Hopper GPU, without the interpreter."""
    if not available() or interpreting() or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability()[0] == HOPPER


def takes_fp8() -> bool:
    """Return True if the GPU has FP8 products (compute capability 8.9 or more), and in the interpreter."""
    return interpreting() or torch.cuda.get_device_capability() >= (8, 9)


_ROUNDED = {
    **dict.fromkeys(("int8", *INT8_DIVIDED, "w8a8", *(f"w8a8-{group}" for group in ROW_GROUPS)), "int8"),
    **{"int4": "int4", "int4-exact": "int4", "w4a8": "int4", "fp8": "fp8"},
}
"""Form of weights that are rounded at load time -> the form that kernels read. Kernels round no rows of x."""


class _Later:
    """A function of a Triton module, which is imported at the first call."""

    def __init__(self, module: str, name: str) -> None:
        self._where = (module, name)
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._function is None:
            module, name = self._where
            self._function = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return self._function(*args)


def _offer(op: str, module: str, function: str, *, name: str = "triton", **more: Any) -> None:
    facts = {"devices": ("cuda",), "dtypes": DTYPES, "available": available, **more}
    register(op, Implementation(name=name, run=_Later(module, function), **facts))


def _offer_words(suffix: str, facts: dict[str, Any]) -> None:
    """Register linear layers with matrices in words, with a higher priority than in ``facts``."""
    facts = {
        **facts,
        "name": facts.get("name", "triton") + "-words",
        "priority": facts["priority"] + 1,
        "dtypes": (torch.bfloat16,),
        "available": lambda: takes_words(),  # tests replace the function
        "pack_codes": _Later("words_linear", "pack"),
    }
    for op in ("linear", "gated_linear"):
        _offer(op, "words_linear", op + suffix, mixes=True, **facts)
        for form, kept in _ROUNDED.items():
            pack = _Later("words_linear", "pack_" + kept)
            _offer(f"{op}_{form}", "words_linear", op + suffix, pack=pack, **facts)


ROUTED = {"moe": "moe", "moe_pieces": "pieces", "moe_plain": "moe_plain", "moe_plain_pieces": "plain_pieces"}
"""Ops of routed blocks, with their functions in ``moe``."""


def _offer_routed(op: str, suffix: str, *, of: str = "", **more: Any) -> None:
    """Register ``op`` of ``ROUTED`` for matrices in the form ``of``.

    Only the whole block of experts with gates returns terms.
    """
    terms = _Later("moe", "moe_terms" + suffix) if op == "moe" else None
    _offer(op + of, "moe", ROUTED[op] + suffix, terms=terms, **more)


for _op in ("rms_norm", "add_rms_norm", "qkv_rope_cache", "qkv_rope_cache_fp8", "gated", "sigmoid_gate"):
    _offer(_op, "fused", _op, invariant=True, priority=FAST)
for _op in ("latent_rope_cache", "latent_rope_cache_fp8"):
    _offer(_op, "latent", _op, invariant=True, priority=FAST)
for _op in ("mix_streams", "add_streams", "rotate_neighbours"):
    _offer(_op, "streams", _op, invariant=True, priority=FAST)
_offer("write_lines", "eight_bits", "write_lines", invariant=True, priority=FAST)
_offer("entry_writer", "latent", "entry_writer", invariant=True, priority=FAST)
_offer("head_product_into", "indexed", "head_product_into", invariant=True, priority=FALLBACK)
_offer("low_rank", "low_rank", "low_rank", invariant=True, priority=FAST)
_fast: dict[str, Any] = {"priority": FAST}
_invariant: dict[str, Any] = {"name": "triton-invariant", "invariant": True, "priority": FALLBACK}
for _suffix, _facts in (("", _fast), ("_invariant", _invariant)):
    _offer_words(_suffix, _facts)
    # Plain weights and codes.
    for _op in ("linear", "gated_linear"):
        _offer(_op, "coded", _op + _suffix, pack_codes=_Later("coded", "pack"), mixes=True, **_facts)
    for _op in ROUTED:
        _offer_routed(_op, _suffix, pack_codes=_Later("moe", "pack_codes"), **_facts)
    for _form, _kept_form in _ROUNDED.items():
        _pack = "pack_" + _kept_form
        _packs: dict[str, Any] = {"pack": _Later("coded", _pack), "pack_codes": _Later("coded", "pack")}
        for _op in ("linear", "gated_linear"):
            _offer(f"{_op}_{_form}", "coded", _op + _suffix, **_packs, **_facts)
        _packs = dict.fromkeys(_packs, _Later("moe", _pack))
        for _op in ROUTED:
            _offer_routed(_op, _suffix, of=f"_{_form}", **_packs, **_facts)
# FP8 products by name. Experts, and everything with --deterministic, keep x as it is.
_scaled: dict[str, Any] = {"pack": _Later("scaled", "pack"), "dtypes": (torch.bfloat16,), "priority": FAST}
for _op in ("linear", "gated_linear"):
    _offer(f"{_op}_w8a8-fp8", "scaled", _op, available=lambda: available() and takes_fp8(), **_scaled)
    _kept: dict[str, Any] = {"pack": _Later("scaled", "pack_invariant"), **_invariant}
    _offer(f"{_op}_w8a8-fp8", "coded", _op + "_invariant", **_kept)
for _suffix, _facts in (("", _fast), ("_invariant", _invariant)):
    for _op in ("moe", "moe_pieces"):
        _packs = dict.fromkeys(("pack", "pack_codes"), _Later("moe", "pack_fp8"))
        _offer_routed(_op, _suffix, of="_w8a8-fp8", **_packs, **_facts)
