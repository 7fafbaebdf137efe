"""The torch backend against a plain reference for one token at a time."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.support.specs import cache_spec, first_seen, model_spec
from weft.attention.base import CoreInput, SegmentInput
from weft.attention.gqa import torch_backend
from weft.attention.gqa.torch_backend import TorchAttention
from weft.attention.registry import BACKENDS, choose
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec

Tensor = torch.Tensor
CPU = torch.device("cpu")


class Scene:
    """Rows with cached contexts and new tokens. All other entries of the cache are NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        window: int = 0,
        block: int = 4,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 8,
        bound: int = 0,
        dtype: torch.dtype = torch.float64,
        softcap: float = 0.0,
    ) -> None:
        rng = random.Random(0)
        torch.manual_seed(0)
        self.rows, self.window, self.heads, self.softcap = rows, window, heads, softcap
        self.spec = cache_spec(window, kv_heads, dim)
        width = max((-(-(start + count + bound) // block) for start, count in rows), default=0)
        total = len(rows) * width + 1
        order = rng.sample(range(1, total), total - 1)
        table = torch.tensor(order, dtype=torch.int64).view(len(rows), width)
        self.cache = torch.full((total, 2, kv_heads, block, dim), float("nan"), dtype=dtype)
        self.keys, self.values, writes = [], [], []
        for row, (start, count) in enumerate(rows):
            k, v = torch.randn(2, start + count, kv_heads, dim, dtype=torch.float64).to(dtype)
            self.keys.append(k)
            self.values.append(v)
            # Positions outside the window of the first new token belong to other sequences.
            for p in range(first_seen(start, window), start):
                self.cache[table[row, p // block], 0, :, p % block] = k[p]
                self.cache[table[row, p // block], 1, :, p % block] = v[p]
            writes += [int(table[row, p // block]) * block + p % block for p in range(start, start + count)]
        tokens = sum(count for _, count in rows)
        self.q = torch.randn(tokens, heads, dim, dtype=torch.float64).to(dtype)
        counts = np.array([count for _, count in rows], np.int32)
        starts = np.array([start for start, _ in rows], np.int32)
        self.segment = SegmentInput(
            begin=0,
            rows=len(rows),
            tokens=tokens,
            host_counts=counts,
            host_starts=starts + np.int32(bound),
            q_offsets=torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32),
            starts=torch.tensor(starts.tolist(), dtype=torch.int64),
            slots=torch.arange(len(rows)),
            live=torch.zeros(len(rows), dtype=torch.int64),
            tables=(table,),
        )
        self._write(writes)

    def _write(self, writes: list[int]) -> None:
        """Write the new tokens' keys and values, as the layer does before attention."""
        rows = list(zip(self.rows, self.keys, self.values, strict=True))
        new = [(k[p], v[p]) for (start, count), k, v in rows for p in range(start, start + count)]
        for place, (k, v) in zip(writes, new, strict=True):
            block, offset = divmod(place, self.cache.shape[3])
            self.cache[block, 0, :, offset] = k
            self.cache[block, 1, :, offset] = v

    def core(self, scale: float = 0.3, prepared: object = None, sinks: Tensor | None = None) -> CoreInput:
        return CoreInput(self.segment, {0: (self.cache,)}, scale, prepared, sinks, self.softcap)

    def run(self, prepared: object = None) -> Tensor:
        out = torch.full_like(self.q, float("nan"))
        TorchAttention().attend(self.q, out, self.core(prepared=prepared), 0, self.spec)
        return out

    def expected(self) -> Tensor:
        """Return the expected output in float64, one token and one head at a time."""
        out, token = torch.empty(self.q.shape, dtype=torch.float64), 0
        shared = self.heads // self.spec.kv_heads
        for (start, count), keys, values in zip(self.rows, self.keys, self.values, strict=True):
            for p in range(start, start + count):
                low = first_seen(p, self.window)
                for head in range(self.heads):
                    k = keys[low : p + 1, head // shared].double()
                    v = values[low : p + 1, head // shared].double()
                    scores = k @ self.q[token, head].double() * 0.3
                    if self.softcap:
                        scores = self.softcap * torch.tanh(scores / self.softcap)
                    out[token, head] = torch.softmax(scores, 0) @ v
                token += 1
        return out


@pytest.mark.parametrize("window", [0, 1, 2, 5, 8, 100, -1, -6])
@pytest.mark.parametrize("block", [1, 3, 4, 16])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1)],
        [(0, 13)],
        [(7, 1), (0, 1), (29, 1), (3, 1)],
        [(5, 9), (0, 4), (17, 1), (8, 4), (2, 2)],
    ],
)
def test_equals_attention_written_out(rows: list[tuple[int, int]], block: int, window: int) -> None:
    scene = Scene(rows, window=window, block=block)
    assert torch.allclose(scene.run(), scene.expected(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 1), (6, 3)])
def test_head_groups(heads: int, kv_heads: int) -> None:
    scene = Scene([(5, 3), (0, 6), (11, 1)], heads=heads, kv_heads=kv_heads)
    assert torch.allclose(scene.run(), scene.expected(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [0, 40, 700, -700])
def test_long_chunks_are_cut_and_long_contexts_are_right(window: int) -> None:
    """More queries than a tile, more keys than a kernel block, and masks that hide whole blocks."""
    rows = [(1100, 2), (900, torch_backend.TILE + 9), (0, 3)]
    scene = Scene(rows, window=window, block=16, heads=2, kv_heads=1, dim=4)
    assert torch.allclose(scene.run(), scene.expected(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("window", [0, 6])
def test_pieces_beyond_the_gather_limit_are_split(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(20 + i % 3, 1) for i in range(9)]
    together = Scene(rows, window=window).run()
    monkeypatch.setattr(torch_backend, "GATHER", 1)
    assert torch.allclose(Scene(rows, window=window).run(), together, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("window", [0, 5, -4])
def test_upper_bounds_of_the_context_do_not_show(window: int) -> None:
    """The device knows a shorter context than the context reserved by the host."""
    rows = [(6, 1), (9, 1), (3, 5)]
    scene = Scene(rows, window=window, bound=7)
    assert torch.allclose(scene.run(), scene.expected(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
@pytest.mark.parametrize("window", [0, 7])
def test_narrow_types(dtype: torch.dtype, tolerance: float, window: int) -> None:
    scene = Scene([(30, 5), (0, 12), (55, 1)], window=window, dtype=dtype)
    made = scene.run()
    assert made.dtype == dtype
    assert (made.double() - scene.expected()).abs().max() < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
def test_capped_scores(sinks: bool, dtype: torch.dtype) -> None:
    """A sink is not capped: with a sink of minus infinity the output is the output without sinks."""
    scene = Scene([(30, 5), (0, 12), (55, 1)], window=20, dtype=dtype, softcap=0.4)
    drawn = torch.full((4,), float("-inf"), dtype=dtype) if sinks else None
    made = torch.full_like(scene.q, float("nan"))
    TorchAttention().attend(scene.q, made, scene.core(sinks=drawn), 0, scene.spec)
    assert (made.double() - scene.expected()).abs().max() < (1e-12 if dtype == torch.float64 else 3e-2)
    scene.softcap = 0.0
    assert (scene.expected() - made.double()).abs().max() > 0.1


def test_no_rows() -> None:
    made = Scene([]).run()
    assert made.shape == (0, 4, 8)


def test_the_cache_is_only_read() -> None:
    scene = Scene([(5, 3), (2, 1)])
    before = scene.cache.clone()
    scene.run()
    assert torch.equal(scene.cache.view(torch.int64), before.view(torch.int64))


def test_prepared_once_gives_the_same() -> None:
    scene = Scene([(5, 3), (2, 1)], window=4)
    prepared = TorchAttention().prepare(scene.segment, 0, scene.spec, 4, torch.float64)
    assert torch.equal(scene.run(prepared), scene.run())


def _spec(heads: int = 4) -> ModelSpec:
    return model_spec(heads, CacheSpec(kind="full", layers=(0,), kv_heads=2, head_dim=8))


@pytest.mark.requirement("B19")
def test_a_backend_that_lacks_a_form_says_so_when_chosen() -> None:
    assert isinstance(choose("auto", _spec(), torch.bfloat16, CPU, 64)["gqa"], TorchAttention)
    with pytest.raises(ConfigError, match=r"torch.*int8"):
        choose("torch", _spec(), torch.int8, CPU, 64)
    with pytest.raises(ConfigError, match=r"no attention backend can serve.*int8"):
        choose("auto", _spec(), torch.int8, CPU, 64)
    with pytest.raises(ConfigError, match=r"does not run on meta"):
        choose("torch", _spec(), torch.float32, torch.device("meta"), 64)
    with pytest.raises(ConfigError, match=r"5 query heads"):
        choose("torch", _spec(5), torch.float32, CPU, 64)


def test_unknown_backend_lists_what_exists() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'torch'.*There are: .*torch"):
        choose("torhc", _spec(), torch.float32, CPU, 64)
    assert "torch" in BACKENDS
