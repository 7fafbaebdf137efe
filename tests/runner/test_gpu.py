"""The runner on a CUDA device: graphs give the tokens of launches, and the host does not wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e0.rig import run, submit
from tests.runner.test_graphs import arrivals
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.mtp_models import make_mtp_checkpoint
from tests.support.sampling import every_way_of_sampling
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.engine.build import release_unused
from weft.engine.core import EngineCore
from weft.ops import draw
from weft.runner.graphs.graphs import CudaCapture, Key
from weft.runner.graphs.timing import CudaTiming
from weft.runner.runner import Runner
from weft.runner.sampling.sampler import Sampler, SampleRows
from weft.types.plan import AllocSlot, column
from weft.types.sampling import TokenParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module", params=["llama", "qwen2_windowed"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gpu"), request.param)


def engine(folder: Path, **settings: Any) -> EngineCore:
    defaults = {"device": "cuda", "block_size": 16, "max_num_seqs": 12, "kv_cache_memory": "64M"}
    config = resolve(from_keywords({"model": str(folder), **defaults, **settings}))
    return EngineCore(config, progress=False)


def answers(core: EngineCore) -> dict[int, list[int]]:
    """Run ``arrivals`` to the end and return the tokens."""
    made = run(core, arrivals(12))
    assert all(answer.error is None for answer in made.values())
    return {number: answer.tokens for number, answer in made.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_give_the_tokens_of_launches(folder: Path, dtype: str) -> None:
    """Kernels are deterministic, so that padding of a bucket cannot change a bit."""
    settings: dict[str, Any] = {"dtype": dtype, "deterministic": True}
    captured, launched = engine(folder, **settings), engine(folder, decode_graphs=False, **settings)
    assert captured.runner.graphs is not None
    assert launched.runner.graphs is None
    assert answers(captured) == answers(launched)
    assert captured.runner.graphs.replayed > 20
    captured.close()
    launched.close()


def with_prompts(vocab: int) -> list[list[Any]]:
    """Return short prompts beside rows that decode, several in one step, in chunks, and with cached
    prefixes. The kernels can draw all rows."""
    rng = np.random.default_rng(4)
    shared = rng.integers(1, vocab, 60).tolist()
    made: list[list[Any]] = [[] for _ in range(24)]
    for number in range(18):
        own = rng.integers(1, vocab, (3, 17, 45, 130)[number % 4]).tolist()
        sampled: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9} if number % 3 else {"temperature": 0.0}
        params = TokenParams(max_tokens=8 + number, **sampled)
        prompt = [*shared, *own] if number % 5 == 4 else own
        made[number // 2 * 2].append(submit(number, prompt, params, request=number))
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_with_prompts_are_replayed(folder: Path, dtype: str) -> None:
    """Padding, empty rows and unfinished prompts change no bit, so the tokens are those of launches."""
    settings: dict[str, Any] = {
        "dtype": dtype,
        "deterministic": True,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
    }
    made: list[dict[int, list[int]]] = []
    replayed: list[int] = []
    for more in ({}, {"decode_graphs": False}):
        core = engine(folder, **settings, **more)
        found = run(core, with_prompts(VOCAB))
        made.append({number: answer.tokens for number, answer in found.items()})
        mixed = core.runner.runner.mixed  # type: ignore[attr-defined]
        replayed.append(0 if mixed is None else mixed.replayed)
        core.close()
    assert replayed[0] > 10
    assert replayed[1] == 0
    assert made[0] == made[1]


DRAFTS: dict[str, Any] = {
    "speculative_method": "ngram",
    "num_speculative_tokens": 4,
    "speculative_adaptive": False,
}


def repeating() -> list[list[Any]]:
    """Return requests with few allowed ids, so that many drafts are right and many are wrong."""
    made: list[list[Any]] = [[] for _ in range(20)]
    for number in range(9):
        sampled = {"temperature": 0.7} if number % 3 == 2 else {"temperature": 0.0}
        params = TokenParams(max_tokens=30 + 4 * number, allowed=(5, 7, 9), **sampled)
        made[2 * number].append(submit(number, [5, 7, 9, 11][: 1 + number % 4] * 6, params, request=number))
    return made


def watch_replays(core: EngineCore) -> list[Key]:
    """Return a list that collects the keys of all replays of ``core`` from now on."""
    keys: list[Key] = []
    graphs = core.runner.graphs
    assert graphs is not None
    replay = graphs.replay

    def noted(key: Key) -> None:
        keys.append(key)
        replay(key)

    graphs.replay = noted  # type: ignore[method-assign]
    return keys


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_with_drafts_are_replayed(folder: Path, dtype: str) -> None:
    """The tokens are those of steps launched op by op, and those without drafts."""
    settings: dict[str, Any] = {"dtype": dtype, "deterministic": True}
    captured = engine(folder, **settings, **DRAFTS)
    keys = watch_replays(captured)
    made = {number: answer.tokens for number, answer in run(captured, repeating()).items()}
    stats = captured.scheduler.stats()
    captured.close()
    assert 0 < sum(stats.drafts_accepted) < sum(stats.drafts)
    assert sum(key.each > 1 for key in keys) > 10
    for more in ({**DRAFTS, "decode_graphs": False}, {}):
        other = engine(folder, **settings, **more)
        expected = {number: answer.tokens for number, answer in run(other, repeating()).items()}
        other.close()
        assert made == expected, f"with {more}"


def test_modules_draft_after_replayed_steps(tmp_path: Path) -> None:
    """Drafts of a module read the hidden states of padded rows. In bfloat16, rounding decides some tokens."""
    folder = make_mtp_checkpoint(tmp_path, skilled=True)
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 128}
    drafts = {**DRAFTS, "speculative_method": "mtp"}
    captured, plain = engine(folder, **settings, **drafts), engine(folder, **settings)
    keys = watch_replays(captured)
    made = [
        {number: answer.tokens for number, answer in run(core, repeating()).items()}
        for core in (captured, plain)
    ]
    replayed = captured.runner.drafter.captured.replayed  # type: ignore[union-attr]
    captured.close()
    plain.close()
    assert replayed > 5
    same = sum(x == y for i in made[0] for x, y in zip(made[0][i], made[1][i], strict=False))
    assert same > 0.6 * sum(map(len, made[1].values()))
    assert sum(key.each > 1 for key in keys) > 10


def test_fast_kernels_with_graphs(folder: Path) -> None:
    """In float32 most tokens equal the CPU's tokens; rounding decides the others."""
    there = engine(folder, dtype="float32")
    here = engine(folder, dtype="float32", device="cpu")
    a, b = answers(there), answers(here)
    assert there.runner.graphs is not None
    assert there.runner.graphs.replayed > 20
    same = sum(x == y for i in a for x, y in zip(a[i], b[i], strict=False))
    assert same > 0.9 * sum(map(len, b.values()))
    there.close()
    here.close()


@pytest.mark.parametrize("settings", [{}, DRAFTS], ids=["plain", "drafts"])
def test_a_replay_does_not_wait(folder: Path, settings: dict[str, Any]) -> None:
    core = engine(folder, dtype="bfloat16", steps_in_flight=1, **settings)
    runner, forward, sample = core.runner, core.runner.forward, core.runner.sample

    def watched(function: Any) -> Any:
        def call(*args: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    answers(core)  # compiles the kernels of eager steps
    runner.forward, runner.sample = watched(forward), watched(sample)  # type: ignore[method-assign]
    assert all(answers(core).values())
    core.close()


DRAWN = [
    TokenParams(temperature=0.0, max_tokens=20),
    TokenParams(temperature=1.0, max_tokens=15),
    TokenParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, max_tokens=18),
    TokenParams(temperature=1.3, top_p=0.8, max_tokens=16),
]
"""Parameters that a captured step can draw."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_draw_the_tokens_of_the_torch_sampler(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three engines give equal tokens: draws in the capture, kernels after each step, and torch alone. Steps
    with a row that the capture cannot draw stay captured."""
    asked = [[submit(i + 1, [5 + i, 6, 7], one, request=i)] for i, one in enumerate(DRAWN * 2)]
    asked += [[submit(20, [3, 9], TokenParams(temperature=0.9, max_tokens=4, logprobs=2), request=20)]]
    settings: dict[str, Any] = {"dtype": dtype, "deterministic": True}
    drawn, sample = [0, 0], Runner._sample

    def noted(runner: Runner, handle: Any, masks: Any) -> Any:
        drawn[handle.drawn is not None] += 1
        return sample(runner, handle, masks)

    monkeypatch.setattr(Runner, "_sample", noted)
    made = []
    for captured, kernels in ((True, True), (False, True), (True, False)):
        if not kernels:
            monkeypatch.setattr(draw, "serves", lambda logits: False)
        core = engine(folder, decode_graphs=captured, **settings)
        made.append({number: answer.tokens for number, answer in run(core, asked).items()})
        if captured and kernels:
            assert core.runner.graphs is not None
            assert drawn[1] > 10
            assert core.runner.graphs.replayed > drawn[1], "a step with logprobs is replayed, too"
        drawn[1] = 0
        core.close()
    assert made[0] == made[1] == made[2]


PARAMS = every_way_of_sampling(9)


def test_the_sampler_never_waits_for_the_device() -> None:
    """Every class of rows in one step, with the tokens of the CPU."""
    torch.manual_seed(0)
    count, length = len(PARAMS), 20
    logits, history = torch.randn(count + 1, VOCAB), torch.randint(0, VOCAB, (count, 32), dtype=torch.int32)
    made = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        sampler = Sampler(count, VOCAB, device)
        for slot, params in enumerate(PARAMS):
            sampler.slots.alloc(
                AllocSlot(
                    slot=slot,
                    gen=1,
                    choice=0,
                    seed=slot,
                    params=params,
                    num_prompt=8,
                    num_cached=0,
                    token_ids=column(list(range(length))),
                )
            )
        order = np.arange(count)[::-1].copy()

        def whole(values: Any, device: torch.device = device) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int64).to(device)

        rows = SampleRows(
            slot_host=order,
            slot=whole(order),
            logits_row=whole(order),
            position=whole([length] * count),
            prompt_slot_host=np.array([6]),
            prompt_slot=whole([6]),
            prompt_logits_row=whole([count]),
            prompt_position=whole([5]),
        )
        arguments = (logits.to(device), rows, history.to(device), whole([8] * count))
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            output = sampler.sample(*arguments)
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        made.append(output)
    assert made[0].tokens.tolist() == made[1].tokens.tolist()
    assert not made[1].error.any()
    assert made[0].logprobs is not None
    assert made[1].logprobs is not None
    assert made[0].logprobs.ids.tolist() == made[1].logprobs.ids.tolist()


def test_no_prompt_waits_for_a_kernel_to_be_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the start, prompts of several lengths run alone and beside others without a compile."""
    import triton

    core = engine(folder, dtype="bfloat16", max_num_batched_tokens=256)
    compiled: list[str] = []

    def noted(*, src: Any, **_: Any) -> None:
        compiled.append(str(getattr(src, "name", src)))

    monkeypatch.setattr(triton.knobs.compilation, "listener", noted)
    answers(core)
    assert not compiled
    core.close()


def test_replays_are_timed_by_the_device() -> None:
    """The time grows with the work. The host waits for neither event."""
    x = torch.ones(2048, 2048, device="cuda")
    seconds: list[float] = []
    for count in (1, 50):

        def run(count: int = count) -> None:
            for _ in range(count):
                torch.mm(x, x)

        replay = CudaCapture(torch.device("cuda"))(run)
        torch.cuda.synchronize()
        timing, behind = CudaTiming(), torch.cuda.Event()
        for number in range(2):  # the first replay also loads the graph
            timing.begin()
            replay()
            timing.end()
            behind.record()
            if count == 50:
                assert not behind.query(), number
            torch.cuda.synchronize()
        seconds.append(timing.seconds())
    assert 0.0 < 10 * seconds[0] < seconds[1] < 10.0


def test_memory_of_a_closed_engine_is_free_for_the_next(folder: Path) -> None:
    release_unused()
    before = torch.cuda.memory_reserved()
    core = engine(folder, dtype="bfloat16")
    answers(core)
    assert torch.cuda.memory_reserved() > before + (64 << 20)
    core.close()
    del core
    release_unused()
    assert torch.cuda.memory_reserved() < before + (16 << 20)
