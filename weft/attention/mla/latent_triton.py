"""Latent attention on CUDA devices: absorbed form by a Triton kernel, expanded form by torch.

In the absorbed form rows have few queries. One tile contains the queries of a row with some of its heads.
Keys are in splits, so that few rows fill the device. With one tile per row nothing is copied from the host,
so a decode segment can be captured in a CUDA graph. Triton is imported at the first segment.
"""

from __future__ import annotations

import torch

from weft.attention.base import CoreInput, SegmentInput
from weft.attention.gqa.triton_backend import MOST_SPLITS, SHORT_SPLIT, Cut, longest, make_cut
from weft.attention.mla.latent import LatentInput
from weft.attention.mla.latent_torch import TorchLatent
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, MLASpec, ModelSpec
from weft.ops import triton as kernels
from weft.ops.triton import forms

Tensor = torch.Tensor

GROUP = 16
"""Maximum heads per tile."""
MAX_LORA, MAX_ROPE = 512, 128


class _LatentTritonPrepared:
    """Cut of a segment, computed at the first layer with the absorbed form and reused by the other layers."""

    def __init__(self) -> None:
        self.cut: Cut | None = None


class TritonLatent(TorchLatent):
    """Latent attention with a Triton kernel for the absorbed form. Stateless, so threads may share an
    instance.

    Tile shapes depend on the batch, so the backend is not invariant.
    """

    capturable = True

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError without Triton, and for a model, dtype or device without support."""
        kernels.check_served("attention backend 'triton'", dtype, device)
        assert spec.mla is not None
        if spec.mla.kv_lora > MAX_LORA or spec.mla.rope > MAX_ROPE:
            raise ConfigError(
                f"attention backend 'triton' has no latent attention of more than {MAX_LORA} + {MAX_ROPE} "
                f"elements an entry, and this has {spec.mla.kv_lora} + {spec.mla.rope}",
                param="--attention-backend",
            )

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> object:
        return _LatentTritonPrepared()

    def attend(self, q: Tensor, out: Tensor, core: CoreInput, latent: LatentInput) -> None:
        """Write ``out``; see ``LatentBackend.attend``.

        The expanded form runs on torch. The tiles of the absorbed form stay in ``prepared``.
        """
        if latent.form == "expanded":
            super().attend(q, out, core, latent)
            return
        segment = core.segment
        if not segment.tokens:
            return
        from weft.ops.triton.latent import attend

        mla = latent.mla
        # [T, heads, kv_lora]: queries in the space of latents. Batches are heads: [heads, T, .] views.
        absorbed = q.new_empty(*q.shape[:2], mla.kv_lora)
        nope = q[..., : mla.nope]
        torch.bmm(nope.transpose(0, 1), latent.up.keys, out=absorbed.transpose(0, 1))
        if latent.low is not None:
            absorbed += latent.low.queries(nope)
        sums = torch.empty_like(absorbed)
        heads = q.shape[1]
        group = max(size for size in range(1, GROUP + 1) if heads % size == 0)
        prepared = (
            core.prepared if isinstance(core.prepared, _LatentTritonPrepared) else _LatentTritonPrepared()
        )
        if prepared.cut is None:
            prepared.cut = _cut(segment, heads, group, latent.spec, mla, q.dtype)
        cut = prepared.cut
        for part in cut.parts:
            attend(
                absorbed,
                q,
                latent.angles,
                sums,
                core.caches[latent.kind],
                segment.q_offsets,
                segment.starts,
                segment.tables[latent.kind],
                part.tiles,
                interleaved=mla.interleaved,
                form=cut.form,
                group=group,
                window=latent.spec.window,
                scale=core.scale,
                split=cut.split,
                splits=cut.splits,
                tokens=(part.begin, part.end),
            )
        torch.bmm(sums.transpose(0, 1), latent.up.values.transpose(1, 2), out=out.transpose(0, 1))
        if latent.low is not None:
            latent.low.add_values(out, sums)


def _cut(
    segment: SegmentInput, heads: int, group: int, spec: CacheSpec, mla: MLASpec, dtype: torch.dtype
) -> Cut:
    """Return the tiles and the kernel form of the absorbed form, with keys split by the longest row."""
    most = longest(segment)
    split = max(SHORT_SPLIT, forms.power(-(-most // MOST_SPLITS)))
    # The latent cache as grouped-query attention: every group of heads counts as a KV head of kv_lora dims.
    parts = CacheSpec(kind="full", layers=spec.layers, kv_heads=heads // group, head_dim=mla.kv_lora)
    form = forms.latent(int(segment.host_counts.max()) * group, dtype, spec.fp8)
    return make_cut(segment, heads, parts, form, split if most > split else 0)
