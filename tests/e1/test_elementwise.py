"""torch functions behind bitwise invariance: every element (or row) is computed alike at any place.

Torch runs a vector loop and a scalar loop for the rest, in each thread's share. Both loops must agree. silu,
gelu, sigmoid, pow and exp2 do not agree, so the invariant forms use the functions tested here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.pairwise import sampled
from tests.support.routed import routed, tokens
from weft.config.spec import RopeSpec
from weft.layers.build import Build
from weft.layers.rope import Rope
from weft.ops import cpu, registry, sampling, tiled, torch_ops
from weft.ops.philox import gumbel
from weft.ops.routing import SCORINGS, Rule, route

Tensor = torch.Tensor
CPU = torch.device("cpu")
THREADS = [1, 2]
WIDE = [torch.float32, torch.float64]
ALL = [*WIDE, torch.bfloat16, torch.float16]
ELEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": lambda x: x.abs().add(1e-30).log(),
    "cos": torch.cos,
    "sin": torch.sin,
    "erf": torch.erf,
    "tanh": torch.tanh,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1e-6),
    "log1p": lambda x: x.abs().neg().exp().log1p(),
    "sqrt": lambda x: x.abs().sqrt(),
}


def _weights(rule: Rule, logits: Tensor) -> Tensor:
    return route(logits, rule)[1]


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of squares": lambda x: x.square().mean(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    **{f"route {scoring}": partial(_weights, Rule(3, scoring, True)) for scoring in SCORINGS},
    "route in groups": lambda x: route(x[:, :8], Rule(2, "sigmoid", True, 4, 2, "top2"))[1],
    "mass_of": sampling.mass_of,
}


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the number of threads to the parameter ``threads`` of the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.node.callspec.params["threads"] if hasattr(request.node, "callspec") else 1)
    yield
    torch.set_num_threads(before)


def noise(*shape: int, dtype: torch.dtype, scale: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def check_elements(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    whole = function(x)
    for begin in range(0, 40, 7):
        for count in (1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 65, 127, 1000, len(x) - 40):
            part = slice(begin, begin + count)
            assert torch.equal(function(x[part]), whole[part])
            assert torch.equal(function(x[part].clone()), whole[part])


@sampled({"name": list(ELEMENTS), "dtype": WIDE, "threads": THREADS})
def test_elements(name: str, dtype: torch.dtype, threads: int) -> None:
    check_elements(ELEMENTS[name], noise(70_001, dtype=dtype))


@pytest.mark.parametrize("threads", THREADS)
def test_noise_of_sampling(threads: int) -> None:
    words = torch.randint(0, 1 << 32, (70_001,), generator=torch.Generator().manual_seed(0))
    check_elements(gumbel, words)


def check_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Check that every row of ``function(x)`` equals the row alone, also at other places and alignments."""
    whole = function(x)
    for count in (1, 2, 5, 16, 33):
        for begin in (*range(0, len(x) - count, 67), len(x) - count):
            rows = slice(begin, begin + count)
            assert torch.equal(function(x[rows]), whole[rows]), (count, begin)
            assert torch.equal(function(x[rows].clone()), whole[rows]), (count, begin)


@sampled({"name": list(ROWS), "columns": [8, 67, 5120], "dtype": WIDE, "threads": THREADS})
def test_rows(name: str, columns: int, dtype: torch.dtype, threads: int) -> None:
    check_rows(ROWS[name], noise(170, columns, dtype=dtype))


@sampled({"activation": ["silu", "gelu", "gelu_pytorch_tanh", "relu"], "dtype": ALL, "threads": THREADS})
def test_gated(activation: str, dtype: torch.dtype, threads: int) -> None:
    x = noise(300, 2 * 173, dtype=dtype)
    check_rows(lambda rows: tiled.gated(rows, activation), x)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
    expected = torch_ops.gated(x, activation)
    assert torch.allclose(tiled.gated(x, activation), expected, rtol=tolerance, atol=tolerance)


@sampled({"kind": ["default", "dynamic"], "dtype": WIDE, "threads": THREADS})
def test_angles(kind: Any, dtype: torch.dtype, threads: int) -> None:
    build = Build(dtype=dtype, device=CPU)
    rope = Rope(RopeSpec(kind=kind, theta=10000.0, dim=24, max_position=64, factor=4.0), build)
    whole = rope.angles(torch.arange(5000))
    for begin in range(0, 4000, 71):
        for count in (1, 2, 5, 900):
            part = slice(begin, begin + count)
            for made, expected in zip(rope.angles(torch.arange(5000)[part]), whole, strict=True):
                assert torch.equal(made, expected[part])


def implementations(op: str, dtype: torch.dtype) -> list[registry.Implementation]:
    """Return every form of ``op`` that claims invariance and can run here."""
    return [
        made
        for made in registry._OPS[op]
        if made.invariant and "cpu" in made.devices and dtype in made.dtypes and made.available()
    ]


MATRICES = [("linear", shape) for shape in ((48, 67), (131, 517), (320, 8))]
MATRICES += [(op, (131, 518)) for op in ("gated_linear", "linear_int8", "gated_linear_int8")]
MATRICES += [(op, (131, 518)) for op in ("linear_w8a8", "gated_linear_w8a8")]
MATRICES += [
    (f"{op}{form}", (131, 518)) for op in ("linear", "gated_linear") for form in ("_int4", "_w4a8", "_fp8")
]


@sampled({"matrix": MATRICES, "dtype": ALL, "threads": THREADS}, slow=True)
def test_matrices(matrix: tuple[str, tuple[int, int]], dtype: torch.dtype, threads: int) -> None:
    op, (inputs, outputs) = matrix
    x, weight = noise(170, inputs, dtype=dtype, scale=1), noise(outputs, inputs, dtype=dtype, scale=0.1)
    bias = noise(outputs, dtype=dtype)
    more = ("silu",) if "gated" in op else ()
    for made in implementations(op, dtype):
        packed = weight if made.pack is None else made.pack(weight)
        for given in (None, bias):
            check_rows(lambda rows, run=made.run, w=packed, b=given: run(rows, w, b, *more), x)  # type: ignore[misc]


@sampled(
    {
        "kind": ["corrected", "hashed", "biased", "gated_shared"],
        "op": ["moe", "moe_int8", "moe_w8a8", "moe_int4", "moe_w4a8", "moe_fp8"],
        "dtype": ALL,
        "threads": THREADS,
    }
)
def test_experts(kind: str, op: str, dtype: torch.dtype, threads: int) -> None:
    weights = routed(kind, dtype)
    x, ids = tokens(290, dtype)
    for made in implementations(op, dtype):
        packed = weights if made.pack is None else made.pack(weights)
        whole = made.run(x, ids, packed)
        for begin, count in ((0, 1), (3, 1), (7, 2), (20, 17), (100, 190)):
            part = slice(begin, begin + count)
            assert torch.equal(made.run(x[part], ids[part], packed), whole[part])


@sampled({"columns": [100, 2048], "dtype": ALL, "threads": THREADS})
def test_sigmoid_gate(columns: int, dtype: torch.dtype, threads: int) -> None:
    """The gates may be columns of a wider tensor."""
    x = noise(170, 2 * columns + 3, dtype=dtype)
    right = x[:, :columns].double() * x[:, columns : 2 * columns].double().sigmoid()
    for made in implementations("sigmoid_gate", dtype):

        def weighed(rows: Tensor, run: Callable[..., Any] = made.run) -> Tensor:
            found: Tensor = run(rows[:, :columns], rows[:, columns : 2 * columns])
            return found

        check_rows(weighed, x)
        tolerance = {torch.bfloat16: 4e-3, torch.float16: 1e-3}.get(dtype, 1e-6)
        assert torch.allclose(weighed(x).double(), right, rtol=tolerance, atol=1e-6)


@sampled({"columns": [100, 2048], "dtype": ALL, "kept": ["narrow", "wide"], "threads": THREADS})
def test_norms(columns: int, dtype: torch.dtype, kept: str, threads: int) -> None:
    x = noise(170, columns, dtype=dtype)
    weight = noise(columns, dtype=torch_ops.wide(dtype) if kept == "wide" else dtype)
    delta = noise(170, columns, dtype=dtype).flip(0)
    joined = torch.cat((x, delta), dim=1)

    for made in implementations("rms_norm", dtype):
        check_rows(lambda rows, run=made.run: run(rows, weight, 1e-6), x)  # type: ignore[misc]
    for made in implementations("add_rms_norm", dtype):

        def added(rows: Tensor, run: Callable[..., Any] = made.run) -> Tensor:
            first, second = (half.contiguous() for half in rows.split(columns, dim=1))
            return torch.cat(run(first.clone(), second, weight, 1e-6), dim=1)

        check_rows(added, joined)


@sampled({"dim": [16, 80, 128], "dtype": ALL, "threads": THREADS})
def test_rotation_and_head_norms(dim: int, dtype: torch.dtype, threads: int) -> None:
    heads, kv_heads, tokens, block = 5, 2, 170, 16
    qkv = noise(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    weights = noise(dim, dtype=dtype), noise(dim, dtype=dtype)
    angles = noise(tokens, dim // 2, dtype=torch_ops.wide(dtype), scale=3)
    cache = torch.zeros(20, 2, kv_heads, block, dim, dtype=dtype)
    where = torch.randperm(19 * block, generator=torch.Generator().manual_seed(2))[:tokens] + block

    for made in implementations("qkv_rope_cache", dtype):

        def rotated(index: Tensor, run: Callable[..., Any] = made.run) -> Tensor:
            rows = index.view(-1)
            memory, writes = cache.clone(), where[rows]
            turns = angles[rows].cos(), angles[rows].sin()
            q = run(qkv[rows], heads, kv_heads, *weights, 1e-6, *turns, memory, writes)
            kept = memory[writes // block, :, :, writes % block]
            return torch.cat((q.flatten(1), kept.flatten(1)), dim=1)

        check_rows(rotated, torch.arange(tokens).unsqueeze(1))


def test_what_is_built() -> None:
    """Checks that the tests above covered the C++ operations, where available."""
    if not cpu.load():
        pytest.skip("the C++ operations are not built")
    assert "cpu" in {made.name for made in implementations("linear", torch.bfloat16)}
