"""Kernels inside one captured decode step, for each family, on a simulated GPU.

A kernel of a CUDA graph costs about two microseconds however small its work is. The limits keep a change of
a layer from adding kernels unnoticed.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.e0 import rig as e0
from tests.rehearsal import device, kernels, ranks, rig
from tests.rehearsal.device import current
from tests.support.slow import mostly_slow
from weft.attention.gqa import triton_backend
from weft.runner.graphs import graphs
from weft.types.sampling import TokenParams

NO_KERNEL = {
    *("view", "slice", "select", "unsqueeze", "expand", "detach", "t", "squeeze", "alias", "_unsafe_view"),
    *("permute", "transpose", "split", "split_with_sizes", "unbind", "lift_fresh", "as_strided", "reshape"),
    *("_reshape_alias", "chunk", "unflatten", "empty", "empty_like", "new_empty", "empty_strided"),
    *("broadcast_tensors", "diagonal", "device"),
}
"""Operators that start no kernel: views, and memory without content."""

Kernels: TypeAlias = collections.Counter[str]


def captured(
    name: str, folder_of: Callable[[str], Path], patch: pytest.MonkeyPatch, **settings: Any
) -> tuple[Kernels, int]:
    """Return (kernels of the first captured step of family ``name``, layers of the model). NCCL's kernels
    count, too."""
    steps: list[tuple[Kernels, int]] = []
    on_device = device.Rehearsal._on_device
    launch = kernels.StandIn._launch
    closure = graphs.DecodeGraphs._closure
    run = ranks.Peers._run

    def operator(made: Any, func: Any, *rest: Any) -> Any:
        if made.capture is not None and func.overloadpacket.__name__ not in NO_KERNEL:
            steps[-1][0][func.overloadpacket.__name__] += 1
        return on_device(made, func, *rest)

    def launched(kernel: Any, *rest: Any, **named: Any) -> None:
        if current().capture is not None:
            steps[-1][0][kernel._contract.name] += 1
        launch(kernel, *rest, **named)

    def ran(peers: Any, name: str, *rest: Any) -> Any:
        if current().capture is not None:
            steps[-1][0][name] += 1
        return run(peers, name, *rest)

    def closed(made: Any, key: Any) -> Any:
        steps.append((collections.Counter(), made._model.spec.layers))
        return closure(made, key)

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(device.Rehearsal, "_on_device", operator)
        patch.setattr(kernels.StandIn, "_launch", launched)
        patch.setattr(graphs.DecodeGraphs, "_closure", closed)
        patch.setattr(ranks.Peers, "_run", ran)

    params = TokenParams(max_tokens=5, temperature=0.0)
    turns = [[e0.submit(0, [5, 6, 7], params, request=0)]]
    rig.rehearse(patch, folder_of(name), turns, plant=plant, **settings)
    assert steps, "no step was captured"
    return steps[0]


DRAW = 5
"""Kernels of the draw and the copy of the tokens. Every captured step with one token per row draws."""
STEP = 25 + DRAW
"""Kernels outside of the layers: positions, angles, embedding, last norm, head, copies, draw."""
GROUP = 7
"""Kernels of a further KV cache group: places of the entries, block tables, tiles."""
SPARSE = {"deepseek-v32": 15.34, "glm-dsa": 14.5, "deepseek-v4": 109.75}
"""Limits of sparse attention. An indexer takes two kernels: scores and the choice. The groups' entries of
DeepSeek V4 are pooled by torch operations."""
MIXERS = {
    "nemotron-h-dense": 9,
    "nemotron-h-moe": 13.25,
    "nemotron-h-latent": 25,
    "granite-hybrid-dense": 13,
    "falcon_h1": 28,
    "falcon_mamba": 13.34,
    "jamba": 17,
    "lfm2": 8.75,
}
"""Limits of families with Mamba2 or Mamba 1 (two kernels), or short convolutions (one). Factors of Granite
and Falcon-H1 are separate kernels, and so is the gate of Falcon-H1's feed-forward. The activation of experts
without a gate takes two kernels. Copies and norms take six kernels of a Mamba 1 with norms."""
LIMITS = {
    **SPARSE,
    **MIXERS,
    "llama": 9,
    "qwen3_moe": 11,
    "deepseek_v3": 13,
    "gpt-oss": 11,
    "qwen3_next": 13.5,
}
"""Kernels of a layer, on average over the layers."""
GROUPS = {"glm-dsa": 2, "gpt-oss": 2}
"""KV cache groups of families with several, whose layers are counted without the groups' own kernels."""


@mostly_slow("name", [*LIMITS], ["llama"])
def test_kernels_of_a_layer(
    name: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, layers = captured(name, folder_of, monkeypatch)
    assert found.total() <= STEP + GROUP * (GROUPS.get(name, 1) - 1) + LIMITS[name] * layers, found


RANKS: dict[str, Any] = {"ranked": True, "tensor_parallel_size": 2}


@mostly_slow("name", ["llama", "qwen3_moe"], ["llama"])
def test_kernels_of_sums_over_ranks(
    name: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum is one kernel. Over NCCL, in the order of ranks, a small sum takes four kernels."""
    found, layers = captured(name, folder_of, monkeypatch, **RANKS, deterministic=True)
    sums = 2 * layers + 1  # the embedding's is the last one
    assert found["_meet"] == sums + 1, "the sums, and the gather of the logits"
    monkeypatch.undo()
    over_nccl, _ = captured(name, folder_of, monkeypatch, **RANKS, deterministic=True, collectives="nccl")
    assert over_nccl.total() - found.total() == 3 * sums, (found, over_nccl)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", *SPARSE])
def test_entries_in_8_bits_add_no_kernel(
    name: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = captured(name, folder_of, monkeypatch)
    monkeypatch.undo()
    found, _ = captured(name, folder_of, monkeypatch, kv_cache_dtype="fp8")
    # Keys in other tiles may need no merge of splits.
    assert plain - found in ({}, {"_merge": plain["_merge"]})
    assert not found - plain, found - plain


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_keys_in_splits_and_caches_in_8_bits_add_no_kernel_to_a_layer(
    cache: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters for the merge are one more kernel of a step."""
    monkeypatch.setattr(triton_backend, "SHORT_SPLIT", 64)
    found, layers = captured("llama", folder_of, monkeypatch, kv_cache_dtype=cache)
    assert found["_attend"] == layers
    assert "_merge" not in found
    assert found.total() <= STEP + 1 + LIMITS["llama"] * layers, found
