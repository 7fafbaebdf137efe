"""Engines on a simulated GPU, and their requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.e0 import rig as e0
from tests.rehearsal import kernels, ranks, stand_ins
from tests.rehearsal.device import Rehearsal, current, running
from tests.rehearsal.guard import UnknownTorch, cuda_guard
from tests.support.sampling import every_way_of_sampling
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.engine.core import EngineCore
from weft.runner import runner as runner_module
from weft.runner.batch.staging import StagingBuffer
from weft.runner.result import Drawn, HostCopy
from weft.types.messages import Submit
from weft.types.plan import StepPlan
from weft.types.sampling import TokenParams

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "block_size": 16,
    "max_model_len": 96,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "kv_cache_memory": "64M",
    "steps_in_flight": 2,
}


@contextmanager
def rehearsed(
    patch: pytest.MonkeyPatch, *, values: bool = False, gpus: int = 1, warm_up: bool = False
) -> Iterator[Rehearsal]:
    """Yield a simulated machine, and check its trace at the end.

    Engines compute no steps before they serve, unless ``warm_up`` is true.
    """
    stand_ins.install(patch, gpus)
    if not warm_up:
        patch.setattr(runner_module.Runner, "warm_up", lambda self, most, progress: None)
    try:
        with cuda_guard(), Rehearsal(values=values) as made:
            kernels.install(patch)
            ranks.install(patch)
            watch_host(patch)
            yield made
            made.check()
    except UnknownTorch as error:
        pytest.skip(f"needs a torch whose guards are known: {error}")


def watch_host(patch: pytest.MonkeyPatch) -> None:
    """Add writes of host memory by numpy to the trace."""
    add, to_result = StagingBuffer.add, runner_module.to_result

    def written(buffer: StagingBuffer, column: np.ndarray) -> slice:
        if buffer._cuda:
            current().host_writes("a staged column", buffer._host)
        return add(buffer, column)

    def read(plan: StepPlan, copy: HostCopy | Drawn) -> Any:
        if isinstance(copy, Drawn):
            if copy._cuda:
                current().host_reads("a result", copy.drawn)
            return to_result(plan, copy)
        parts = [copy.tokens, copy.error, copy.accepted, copy.drafts]
        for logprobs in (copy.logprobs, copy.prompt_logprobs):
            if logprobs is not None:
                parts += [logprobs.ids, logprobs.values, logprobs.rank, logprobs.error]
        if copy._cuda:
            current().host_reads("a result", *[part for part in parts if part is not None])
        return to_result(plan, copy)

    patch.setattr(StagingBuffer, "add", written)
    patch.setattr(runner_module, "to_result", read)


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    return resolve(from_keywords({"model": str(folder), **SETTINGS, **settings}))


class Answers:
    """Results of a device without values: arbitrary tokens, and some correct drafts."""

    def __init__(self, made: Rehearsal, patch: pytest.MonkeyPatch, vocab: int) -> None:
        self._rng = np.random.default_rng(5)
        self._vocab = vocab
        self._counts: np.ndarray | None = None
        made.stand_in = self._fill
        answers = self
        start, sample = HostCopy.__init__, runner_module.Runner._sample_step

        def noted(copy: HostCopy, output: Any, accepted: Any = None, *rest: Any) -> None:
            answers._accepted = accepted
            start(copy, output, accepted, *rest)
            if copy.accepted is not None and not made.values:
                right = answers._rng.integers(0, answers._plan.decode.count)
                copy.accepted.copy_(torch.from_numpy(right))

        def sampled(runner: Any, handle: Any, masks: Any) -> Any:
            answers._plan = handle.plan
            return sample(runner, handle, masks)

        patch.setattr(HostCopy, "__init__", noted)
        patch.setattr(runner_module.Runner, "_sample_step", sampled)

    _plan: StepPlan

    def _fill(self, host: torch.Tensor) -> None:
        host.zero_()
        if host.dtype == torch.int64:
            host.random_(0, self._vocab)


PARAMS = every_way_of_sampling(4)
PARAMS[1] = replace(PARAMS[1], max_tokens=5)  # not all end in the same step
GREEDY = TokenParams(temperature=0.0, max_tokens=3)


def arrivals(vocab: int, params: list[TokenParams] | None = None, seed: int = 3) -> list[list[Submit]]:
    """Return prompts for a few turns: chunks, mixed steps, shared prefixes, and all ways of sampling."""
    rng = random.Random(seed)
    shared = [rng.randrange(1, vocab) for _ in range(40)]
    turns: list[list[Submit]] = [[] for _ in range(12)]
    for number, one in enumerate(params or PARAMS):
        prompt = [rng.randrange(1, vocab) for _ in range(rng.choice([3, 17, 33, 70]))]
        if number % 3 == 2:
            prompt = shared + prompt[:20]
        turns[number % 4 * 3].append(e0.submit(number, prompt, one, request=number))
    return turns


def few(vocab: int) -> list[list[Submit]]:
    """Return three prompts: one in chunks, one beside a decode, one with a cached prefix."""
    rng = random.Random(7)
    shared = [rng.randrange(1, vocab) for _ in range(36)]
    sampled = TokenParams(temperature=0.8, top_k=5, max_tokens=3)
    return [
        [e0.submit(0, [5, 6, 7], GREEDY, request=0), e0.submit(1, [*shared, *shared], sampled, request=1)],
        [],
        [],
        [e0.submit(2, [*shared, 9], GREEDY, request=2)],
    ]


def one(length: int) -> Submit:
    """Return a prompt of ``length`` tokens."""
    return e0.submit(0, list(range(1, length + 1)), GREEDY, request=0)


def short() -> list[list[Submit]]:
    """Return two repetitive prompts, so that drafts are found."""
    params = TokenParams(temperature=0.0, max_tokens=4)
    return [[e0.submit(0, [5, 6, 7] * 3, params, request=0)], [e0.submit(1, [8, 9] * 4, params, request=1)]]


def prompt_of(submit: Submit) -> list[int]:
    return np.frombuffer(submit.prompt_ids, np.int32).tolist()


def serve(core: EngineCore, made: Rehearsal, turns: list[list[Submit]]) -> dict[int, e0.Answer]:
    """Run the requests to the end and return the answers."""
    with running(made):
        answers = e0.run(core, turns)
    assert all(answer.ends for answer in answers.values())
    return answers


def rehearse(
    patch: pytest.MonkeyPatch,
    folder: Path,
    turns: list[list[Submit]] | None = None,
    *,
    values: bool = False,
    ranked: bool = False,
    plant: Callable[[pytest.MonkeyPatch], None] | None = None,
    warm_up: bool = False,
    **settings: Any,
) -> tuple[Rehearsal, dict[int, e0.Answer], EngineCore]:
    """Serve ``turns`` on a simulated GPU. Return (rehearsal, answers, closed engine).

    ``ranked``: the engine is the first of several ranks, each with a GPU. ``plant``: installs a bug.
    ``warm_up``: see ``rehearsed``.
    """
    gpus = settings.get("tensor_parallel_size", 1) * settings.get("data_parallel_size", 1)
    with rehearsed(patch, values=values, gpus=gpus, warm_up=warm_up) as made:
        config = config_of(folder, **settings)
        Answers(made, patch, config.spec.vocab_size)
        if plant is not None:
            plant(patch)
        core = ranks.first_rank(config)[0] if ranked else EngineCore(config, progress=False)
        answers = serve(core, made, turns or few(config.spec.vocab_size))
        core.close()
    return made, answers, core
