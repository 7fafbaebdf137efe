"""Whole models on Triton's ops and attention, in the interpreter on the CPU: the ops fit the layers.

On a GPU the same ops are chosen by default, and test_gpu.py compares models on them.
"""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.e0.rig import make_engine, run, submit
from tests.e0.test_loras import load
from tests.support.checkpoints import make_checkpoint
from tests.support.loras import DENSE, make_adapter, merge
from tests.support.slow import mostly_slow
from weft.attention.base import Backends, LayerCache
from weft.attention.gqa import triton_backend
from weft.attention.gqa.triton_backend import TritonAttention, TritonInvariant
from weft.attention.sparse.sparse_triton import TritonInvariantSparse, TritonSparse
from weft.config.adapters import read_adapter
from weft.config.families import load_spec
from weft.config.sections.lora_section import LoraSection
from weft.layers import build
from weft.models.loader import load_model
from weft.moe.block import RoutedMLP
from weft.ops import registry
from weft.ops import triton as kernels
from weft.ops.moe import ExpertSum, summed
from weft.parallel.comm import LocalComm, drive
from weft.runner.graphs.graphs import DecodeGraphs, GraphOptions
from weft.types.plan import Segment, column
from weft.types.sampling import TokenParams

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="needs Triton and TRITON_INTERPRET=1")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Choose the ops of a GPU for CPU tensors. Return the set of chosen names."""
    names: set[str] = set()

    def as_on_a_gpu(op: str, dtype: torch.dtype, device: torch.device, **more: Any) -> Any:
        found = registry.choose(op, dtype, CUDA, **more)
        names.add(f"{op}: {found.name}")
        return found

    monkeypatch.setattr(build, "choose", as_on_a_gpu)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("backend", [TritonSparse, TritonInvariantSparse])
@pytest.mark.parametrize("name", ["deepseek-v32", "deepseek-v32-yarn", "glm-dsa"])
def test_logits_of_sparse_attention(
    name: str, backend: type[TritonSparse], checkpoints: Any, paged: Any, chosen: set[str]
) -> None:
    """Sequences are longer than the choice, so that the indexer decides. Its products are joined."""
    checkpoint = checkpoints(name)
    model = checkpoint.load()
    harness = paged(model)
    harness.backends = Backends([backend()])
    one, two = harness.sequence(list(range(20))), harness.sequence([5, 9, 40, 7, 8, 3, 77, 12, 6, 1])
    harness.step([(one, 15)])
    harness.step([(two, 8)], [(one, 1)])
    harness.step([(one, 4)], [(two, 1)])
    for sequence in (one, two):
        expected, made = checkpoint.expected(sequence.ids), torch.stack(sequence.logits)
        assert (made - expected[: len(made)]).abs().max() / expected.abs().max() < 1e-4
    attention = model.blocks[0].attention
    assert attention.down.joined
    assert attention.q_up.joined
    assert "entry_writer: triton" in chosen


@mostly_slow("name", ["qwen3", "mistral-window", "qwen3-moe"], ["qwen3"])
def test_logits_are_the_references(name: str, checkpoints: Any, paged: Any, chosen: set[str]) -> None:
    checkpoint = checkpoints(name)
    model = checkpoint.load()
    harness = paged(model)
    harness.backends = Backends([TritonAttention()])
    one, two = harness.sequence(list(range(14))), harness.sequence([5, 9, 40, 7, 8])
    harness.step([(one, 9)])
    harness.step([(two, 4)], [(one, 1)])
    harness.step([(one, 4)], [(two, 1)])
    for sequence in (one, two):
        expected, made = checkpoint.expected(sequence.ids), torch.stack(sequence.logits)
        assert (made - expected).abs().max() / expected.abs().max() < 1e-4
    assert {"add_rms_norm: triton", "qkv_rope_cache: triton"} <= chosen
    if name == "qwen3-moe":
        assert model.blocks[0].feed_forward._terms is not None, "norms add the experts"
    else:
        assert "gated_linear: triton" in chosen


@mostly_slow("name", ["llama4-plain", "gemma4-moe", "qwen3-moe"], ["gemma4-moe"])
def test_terms_are_the_output_of_the_block(name: str, checkpoints: Any, chosen: set[str]) -> None:
    """Also of blocks that change the weights or the results of their experts."""
    model = checkpoints(name).load()
    blocks = [one for one in model.modules() if isinstance(one, RoutedMLP)]
    assert blocks
    assert any(one.startswith("moe") for one in chosen)
    for block in blocks:
        x = torch.randn(5, model.spec.hidden)
        expected = drive(block.steps(LocalComm(), x, None))
        assert torch.equal(summed(drive(block.terms(LocalComm(), x, None))), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("chosen")
def test_results_of_experts_end_at_the_next_norm(
    checkpoints: Any, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts would otherwise need the results of two layers at once, [T, k, hidden] each."""
    model = checkpoints("qwen3-moe").load()
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def terms(own: Any, *args: Any) -> Any:
        result = yield from own(*args)
        made.append(weakref.ref(result.made))
        return result

    def attend(own: Any, *args: Any) -> Any:
        alive.append(sum(one() is not None for one in made))
        return own(*args)

    for block in model.blocks:
        monkeypatch.setattr(block.feed_forward, "terms", partial(terms, block.feed_forward.terms))
        monkeypatch.setattr(block.attention, "forward", partial(attend, block.attention.forward))
    harness = paged(model)
    harness.backends = Backends([TritonAttention()])
    harness.step([(harness.sequence([5, 9, 40, 7]), 4)])
    assert len(made) == len(alive) > 1
    assert not any(alive), alive


@pytest.mark.slow
@pytest.mark.usefixtures("chosen")
def test_experts_are_added_once_where_the_stream_is_watched(
    checkpoints: Any, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft head reads the stream before some layers. The next norm then reads the sum."""
    model = checkpoints("qwen3-moe").load()
    watched: list[int] = []
    added: list[Any] = []
    monkeypatch.setattr(
        model, "hidden", partial(model.hidden, see=lambda layer, x, delta: watched.append(layer))
    )
    for block in model.blocks:
        own = block.attention_norm
        monkeypatch.setattr(own, "add", lambda x, delta, add=own.add: (added.append(delta), add(x, delta))[1])
    harness = paged(model)
    harness.backends = Backends([TritonAttention()])
    harness.step([(harness.sequence([5, 9, 40, 7]), 4)])
    assert watched == [*range(len(model.blocks))]
    assert len(added) > 1
    assert not any(isinstance(one, ExpertSum) for one in added)


@pytest.mark.slow
@pytest.mark.usefixtures("ordered_products")
def test_replayed_decodes_have_the_bits_of_launched_ones(tmp_path: Path, chosen: set[str]) -> None:
    """In deterministic mode padding of a bucket, chunks of prompts and neighbouring rows change no token."""
    folder = make_checkpoint(tmp_path, "llama")
    model = load_model(
        str(folder), load_spec(str(folder), None), torch.float32, CPU, progress=False, invariant=True
    )
    assert {"linear: triton-invariant", "gated_linear: triton-invariant"} <= chosen
    logits: list[dict[tuple[int, int], torch.Tensor]] = []
    answers = []
    for graphs in (False, True):
        engine, runner = make_engine(folder, model=model, chunk=5 if graphs else 0, max_num_seqs=4)
        runner._backends = runner._builder._backends = Backends([TritonInvariant()])
        runner._cache[:] = _float32(runner._cache)
        if graphs:
            options = GraphOptions(max_rows=4, capture=lambda run: run)
            runner.graphs = DecodeGraphs(
                model, runner._cache, runner._backends, runner._builder, runner._state, 96, options
            )
        asked = [
            submit(
                i + 1, [3 * i + 2, 9, 30 - i] * (i + 1), TokenParams(temperature=0.0, max_tokens=4), request=i
            )
            for i in range(3)
        ]
        logits.append(_kept(runner))
        answers.append({i: answer.tokens for i, answer in run(engine, [asked]).items()})
        assert graphs == (runner.graphs is not None and runner.graphs.replayed > 0)
        engine.close()
    assert answers[0] == answers[1]
    assert logits[0].keys() == logits[1].keys()
    assert all(torch.equal(logits[0][key], logits[1][key]) for key in logits[0])


@mostly_slow("shape", ["llama", "mistral", "qwen3_moe"], ["llama"])
def test_logits_under_an_adapter_are_those_of_the_merged_checkpoint(
    shape: str, tmp_path: Path, chosen: set[str]
) -> None:
    """Also of layers with matrices that are published both joined and single."""
    base = make_checkpoint(tmp_path, shape)
    folder = make_adapter(tmp_path / "adapter", base, DENSE)
    digest = read_adapter(folder).digest
    kept = []
    for path, places in ((merge(tmp_path / "merged", base, folder), 0), (base, 1)):
        model = load_model(
            str(path),
            load_spec(str(path), None),
            torch.float32,
            CPU,
            progress=False,
            adapters=build.AdapterOptions(places=places, rank=4),
        )
        engine, runner = make_engine(path, model=model, lora=LoraSection(max_loras=places))
        runner._backends = runner._builder._backends = Backends([TritonAttention()])
        runner._cache[:] = _float32(runner._cache)
        if places:
            load(engine, folder, digest)
        kept.append(_kept(runner))
        asked = TokenParams(temperature=0.0, max_tokens=4)
        run(engine, [[submit(1, [*range(3, 14)], asked, request=1, adapter=digest if places else "")]])
        engine.close()
    assert "low_rank: triton" in chosen
    merged, adapted = kept
    assert merged.keys() == adapted.keys()
    assert len(merged) == 4
    for key, due in merged.items():
        assert (adapted[key] - due).abs().max() < 1e-4 * due.abs().max(), key


class _NoHost(TorchDispatchMode):
    """Refuse operations that a CUDA graph cannot hold: host reads of values, and value-dependent shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        assert not any(word in name for word in ("local_scalar", "nonzero", "unique")), name
        masks = [one for one in args[1] if one is not None] if name == "aten::index.Tensor" else []
        assert all(one.dtype != torch.bool for one in masks), "a mask on the device decides a shape"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "asks", [lambda x: x[1].item(), lambda x: x.nonzero(), lambda x: x[x > 1], lambda x: int(x.sum())]
)
def test_the_guard_sees_what_asks_the_host(asks: Any) -> None:
    with torch.no_grad(), _NoHost(), pytest.raises(AssertionError):
        asks(torch.arange(3))


@pytest.mark.parametrize("backend", [TritonAttention, TritonInvariant])
def test_a_decode_step_asks_the_host_nothing(
    tmp_path: Path, backend: Any, chosen: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step reads no value on the host and uploads nothing, for every bucket."""

    def refused(array: Any, device: Any) -> torch.Tensor:
        raise AssertionError("a copy from the host inside a step that is captured")

    monkeypatch.setattr(triton_backend, "upload", refused)
    folder = make_checkpoint(tmp_path, "qwen2_windowed")
    model = load_model(str(folder), load_spec(str(folder), None), torch.float32, CPU, progress=False)
    engine, runner = make_engine(folder, model=model, max_num_seqs=4)
    backends = runner._builder._backends = Backends([backend()])
    cache = _float32(runner._cache)
    for rows, context in ((1, 96), (4, 96)):
        slots = torch.full((rows,), runner._state.spare)
        start, one = column([context - 1] * rows), column([1] * rows)
        bound = Segment(slot=one, gen=one, start=start, count=one)
        with torch.no_grad(), _NoHost():
            logits = drive(model.steps(runner._builder.decode(slots, bound), cache, backends))
        assert logits.shape[0] == rows
    engine.close()


def _float32(cache: list[LayerCache]) -> list[LayerCache]:
    return [
        {
            kind: tuple(torch.zeros_like(t, dtype=torch.float32) for t in tensors)
            for kind, tensors in layer.items()
        }
        for layer in cache
    ]


def _kept(runner: Any) -> dict[tuple[int, int], torch.Tensor]:
    """Return a dict that fills during the run: (slot, position) -> logits of the sampled token."""
    kept: dict[tuple[int, int], torch.Tensor] = {}
    sample = runner._sampler.sample

    def sampled(logits: torch.Tensor, rows: Any, *rest: Any) -> Any:
        for slot, row, position in zip(rows.slot, rows.logits_row, rows.position, strict=True):
            kept[int(slot), int(position)] = logits[row].clone()
        return sample(logits, rows, *rest)

    runner._sampler.sample = sampled
    return kept
