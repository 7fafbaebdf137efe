"""Memory of a loaded model, as one number for the budget of a server of several models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from weft.config.resolved import EngineConfig, KVConfig

OVERHEAD = 1.05
"""Bytes in memory for each byte of the weight files."""
_FILES = ("*.safetensors", "*.gguf", "*.bin")
"""Patterns of weight files. The first pattern with files counts."""


def model_cost(groups: Iterable[EngineConfig], num_blocks: Sequence[int] = ()) -> int:
    """Return the bytes of all groups of a model: weights and caches. ``num_blocks``: blocks of each KV cache
    group, as an engine reported; () for the settings."""
    return sum(_group_cost(group, num_blocks) for group in groups)


def _group_cost(group: EngineConfig, num_blocks: Sequence[int]) -> int:
    """Return the bytes of one group. Tensor parallel ranks share the weights; replicas have copies."""
    layout = group.parallel.layout
    weights = 0 if group.scripted else int(_weight_bytes(Path(group.model_path)) * OVERHEAD)
    return weights * layout.data + _cache_bytes(group.kv, group.dtype, num_blocks) * layout.ranks


def _cache_bytes(kv: KVConfig, dtype: str, num_blocks: Sequence[int]) -> int:
    """Return the bytes of one rank's caches."""
    pools = kv.pools
    if len(num_blocks) == len(pools):
        pairs = zip(pools, num_blocks, strict=True)
        pools = tuple(msgspec.structs.replace(pool, num_blocks=count) for pool, count in pairs)
    media = 0 if kv.media is None else kv.media.pool_bytes
    return sum(tensor.nbytes for pool in pools for tensor in kv.tensors(pool, dtype)) + media


def _weight_bytes(path: Path) -> int:
    """Return the bytes of the weight files in the folder ``path``, or of the file ``path``."""
    if path.is_file():
        return path.stat().st_size
    for pattern in _FILES:
        if sizes := [one.stat().st_size for one in path.glob(pattern)]:
            return sum(sizes)
    return 0
