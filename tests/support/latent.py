"""Build queries and entries of latent attention in a paged cache, with a plain reference of the result."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from weft.attention.base import CoreInput, SegmentInput
from weft.attention.mla.latent import Form, LatentBackend, LatentInput, UpMatrices
from weft.config.spec import CacheSpec, MLASpec
from weft.ops import cpu
from weft.ops.cpu.latent import latent_up
from weft.ops.cpu.served import DTYPES
from weft.ops.latent_ops import rotate_pairs
from weft.ops.torch_ops import wide

Tensor = torch.Tensor

NAN = float("nan")


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer."""

    heads: int = 3
    nope: int = 12
    rope: int = 8
    v: int = 10
    lora: int = 20
    block: int = 4


#: Sizes that the C++ operations support.
SMALL = Shape(heads=3, nope=32, rope=16, v=48, lora=64, block=16)
WIDE = Shape(heads=8, nope=64, rope=64, v=64, lora=512, block=64)


@dataclass
class Scene:
    """Hold rows (start, count) of sequences in a cache; all unused entries are NaN."""

    rows: list[tuple[int, int]]
    shape: Shape = field(default_factory=Shape)
    window: int = 0
    dtype: torch.dtype = torch.float64
    bound: int = 0
    """Excess of the host's bound of the context over the device's context."""
    interleaved: bool = True

    def __post_init__(self) -> None:
        s = self.shape
        rng, made = random.Random(0), torch.Generator().manual_seed(0)
        width = s.lora + s.rope
        sizes = [-(-(start + count + self.bound) // s.block) for start, count in self.rows]
        ids = rng.sample(range(1, sum(sizes) + 1), sum(sizes))
        self.cache = torch.full((sum(sizes) + 1, s.block, width), NAN, dtype=self.dtype)
        self.table = torch.zeros(len(self.rows), max(sizes, default=0), dtype=torch.int64)
        self.entries: list[Tensor] = []
        for row, (start, count) in enumerate(self.rows):
            self.table[row, : sizes[row]] = torch.tensor([ids.pop() for _ in range(sizes[row])])
            entries = torch.randn(start + count, width, generator=made, dtype=torch.float64).to(self.dtype)
            for p in range(max(0, start - self.window + 1) if self.window else 0, start + count):
                self.cache[self.table[row, p // s.block], p % s.block] = entries[p]
            self.entries.append(entries)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=made, dtype=torch.float64) * scale).to(self.dtype)

        tokens = sum(count for _, count in self.rows)
        self.q = draw(tokens, s.heads, s.nope + s.rope)
        self.keys = draw(s.heads, s.nope, s.lora, scale=s.lora**-0.5)
        self.values = draw(s.heads, s.v, s.lora, scale=s.lora**-0.5)
        angles = torch.rand(tokens, s.rope // 2, generator=made, dtype=torch.float64).to(wide(self.dtype))
        self.cos, self.sin = angles.cos() * 1.1, angles.sin() * 1.1
        self.mla = MLASpec(
            q_lora=None,
            kv_lora=s.lora,
            nope=s.nope,
            rope=s.rope,
            v=s.v,
            scale=(s.nope + s.rope) ** -0.5,
            interleaved=self.interleaved,
        )
        self.spec = CacheSpec(kind="latent", layers=(0,), window=self.window, width=width, form="latent")

    @property
    def up(self) -> UpMatrices:
        packs = self.dtype in DTYPES and self.shape.lora % 16 == 0 and cpu.load()
        packed = latent_up(self.keys, self.values) if packs else None
        return UpMatrices(keys=self.keys, values=self.values, packed=packed)

    def segment(self, rows: list[tuple[int, int, int]] | None = None) -> tuple[SegmentInput, Tensor]:
        """(segment, tokens) of (row, first, count), ``first`` counted from the row's first query."""
        if rows is None:
            rows = [(r, 0, count) for r, (_, count) in enumerate(self.rows)]
        begins = np.cumsum([0, *(count for _, count in self.rows)])
        counts = np.array([count for *_, count in rows], np.int32)
        starts = np.array([self.rows[r][0] + first for r, first, _ in rows], np.int64)
        tokens = [begins[r] + first + i for r, first, count in rows for i in range(count)]
        none = torch.zeros(len(rows), dtype=torch.int64)
        segment = SegmentInput(
            begin=0,
            rows=len(rows),
            tokens=int(counts.sum()),
            host_counts=counts,
            host_starts=(starts + self.bound).astype(np.int32),
            q_offsets=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
            starts=torch.tensor(starts),
            slots=none,
            live=none,
            tables=(self.table[[r for r, *_ in rows]],),
        )
        return segment, torch.tensor(tokens, dtype=torch.int64)

    def run(
        self, backend: LatentBackend, form: Form, rows: list[tuple[int, int, int]] | None = None
    ) -> Tensor:
        segment, tokens = self.segment(rows)
        q, angles = self.q[tokens], (self.cos[tokens], self.sin[tokens])
        out = q.new_full((len(q), self.shape.heads, self.shape.v), NAN)
        core = CoreInput(segment, {0: (self.cache,)}, self.mla.scale)
        backend.attend(q, out, core, LatentInput(angles, 0, self.spec, self.mla, self.up, form))
        return out

    def expected(self) -> Tensor:
        """Return the reference output in float64, computed row by row with keys and values of every head."""
        s, made, begin = self.shape, [], 0
        for (start, count), entries in zip(self.rows, self.entries, strict=True):
            part = slice(begin, begin + count)
            turned = rotate_pairs(
                self.q[part, :, s.nope :].double(),
                self.cos[part].double(),
                self.sin[part].double(),
                self.interleaved,
            )
            q = torch.cat((self.q[part, :, : s.nope].double(), turned), dim=-1).transpose(0, 1)
            latent, shared = entries.double().split((s.lora, s.rope), dim=-1)
            k = torch.einsum("sl,hdl->hsd", latent, self.keys.double())
            k = torch.cat((k, shared.expand(s.heads, -1, -1)), dim=-1)
            v = torch.einsum("sl,hvl->hsv", latent, self.values.double())
            queries, keys = torch.arange(start, start + count)[:, None], torch.arange(start + count)[None]
            seen = keys <= queries
            if self.window:
                seen &= keys > queries - self.window
            scores = (q @ k.transpose(1, 2) * self.mla.scale).masked_fill(~seen, -torch.inf)
            made.append((scores.softmax(-1) @ v).transpose(0, 1))
            begin += count
        return torch.cat(made) if made else torch.zeros(0, s.heads, s.v, dtype=torch.float64)


def bits(x: Tensor) -> Tensor:
    """Return the same memory as integers."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def on_device(segment: SegmentInput, device: torch.device | str) -> SegmentInput:
    """Return ``segment`` with offsets, starts and tables on ``device``."""
    return replace(
        segment,
        q_offsets=segment.q_offsets.to(device),
        starts=segment.starts.to(device),
        tables=tuple(table.to(device) for table in segment.tables),
    )
