"""The namespace of the disk tier: records are read only where they would have been computed with equal bits.

    weights     digest over all bytes of the weights
    model       spec, dtypes, quantization, implementation, layout of blocks
    numerics    what decides the bits of a computation: the build of the C++ operations, torch, the CPU's
                instructions or the GPU, the attention backends, --deterministic

A change of any part starts an empty namespace. So an upgrade of Weft or of torch starts an empty namespace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from weft.config.fingerprint import spec_facts
from weft.config.resolved import EngineConfig, PoolSpec
from weft.config.spec import CacheSpec
from weft.store import layout


def kv_namespace(config: EngineConfig, weights: str, numerics: Mapping[str, str]) -> str:
    """Return the namespace, 32 hex digits.

    weights: see ``weights_digest``. numerics: names and values, see ``weft.ops.numerics.numerics``.
    """
    text = json.dumps(facts_of(config, weights, numerics), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def facts_of(config: EngineConfig, weights: str, numerics: Mapping[str, str]) -> dict[str, Any]:
    """Return everything that the namespace covers, by name."""
    model, kv = config.model, config.kv
    # The caches of the whole model: `kv.pools` has those of one rank.
    each = zip(kv.pools, config.spec.caches, strict=True)
    return {
        "layout": layout.VERSION,
        "weights": weights,
        # Embeddings of images depend on the tower's weights, which the digest covers.
        "spec": spec_facts(msgspec.structs.replace(config.spec, vision=None)),
        "dtype": config.dtype,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "quantization": model.quantization,
        "implementation": [model.model_impl, model.hf_overrides],
        "block_size": kv.block_size,
        # Dims and types of a block of each KV cache group, whatever the number of blocks.
        "blocks": [_block(pool, cache, config.dtype) for pool, cache in each],
        "speculation": config.speculation.speculative_method,
        "device": config.device,
        # Equal bits across numbers of ranks are not promised.
        "ranks": config.parallel.tensor_parallel_size if config.runner.deterministic else 0,
        "deterministic": config.runner.deterministic,
        "numerics": dict(numerics),
    }


def _block(pool: PoolSpec, cache: CacheSpec, dtype: str) -> dict[str, Any]:
    types = [(tensor.name, tensor.dtype) for tensor in pool.tensors(dtype)]
    return {"size": pool.block_size, "cache": msgspec.to_builtins(cache), "types": types}
