"""A step without an adapter row, beside loaded adapters, makes the calls of a server without places."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.checkpoints import make_checkpoint
from tests.support.loras import make_adapter
from tests.support.slow import mostly_slow
from weft.config.hub import bundled_models
from weft.config.resolve import resolve
from weft.config.sections.all import CacheSection, Config, ModelSection, RunnerSection, SchedulerSection
from weft.config.sections.lora_section import LoraSection
from weft.engine.core import EngineCore
from weft.ops import cpu
from weft.types.messages import Submit, ids_to_bytes
from weft.types.sampling import TokenParams

pytestmark = pytest.mark.skipif(not cpu.load(), reason="the C++ operations are not built")

STEPS = 4
"""A prompt, the step that captures, and two replays."""


class Operators(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def engine(base: Path, adapter: Path | None) -> EngineCore:
    """Return an engine of ``base``. ``adapter``: loaded, with one place; None for no places."""
    lora = LoraSection()
    if adapter is not None:
        lora = LoraSection(max_loras=1, max_lora_rank=3, lora_modules=(f"a={adapter}",))
    config = Config(
        model=ModelSection(model=str(base), dtype="float32", max_model_len=64),
        cache=CacheSection(kv_cache_memory="8M", enable_prefix_caching=False),
        scheduler=SchedulerSection(max_num_seqs=2, steps_in_flight=1),
        runner=RunnerSection(device="cpu", threads=1),
        lora=lora,
    )
    return EngineCore(resolve(config), progress=False)


def submit(core: EngineCore, adapter: str = "", tokens: int = STEPS) -> None:
    params = TokenParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens)
    ids = ids_to_bytes(np.array([5, 6, 7, 8]))
    core.submit(Submit(sequence=0, request=0, seed=0, prompt_ids=ids, params=params, adapter=adapter))


def steps(core: EngineCore, adapter: str = "") -> tuple[list[Counter[str]], Counter[str]]:
    """Run a request. Return (operators of the first two steps, Python calls of a replayed step)."""
    submit(core, adapter)
    operators = []
    for _ in range(2):
        with Operators() as watch:
            core.step()
        operators.append(watch.calls)
    core.step()
    calls = Counter[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        core.step()
    finally:
        sys.setprofile(before)
    while core.has_work():
        core.step()
    return operators, calls


@mostly_slow("dense", [False, True], 1)
def test_base_rows_make_the_calls_of_a_server_without_places(dense: bool, tmp_path: Path) -> None:
    """The bundled model has experts in every layer."""
    base = make_checkpoint(tmp_path, "llama") if dense else Path(bundled_models()["spool-text"])
    plain = engine(base, None)
    submit(plain, tokens=1)
    plain.step()
    expected, python = steps(plain)
    # In dense layers the product of gate and up and the activation are two operators: the bits of a row must
    # not depend on the adapters of other rows.
    apart = Counter({"weft_cpu.gated.default": plain.config.spec.layers} if dense else {})
    plain.close()
    core = engine(base, make_adapter(tmp_path / "a", base))
    try:
        # The second time comes after rows with the adapter. Then the second step is replayed.
        for compared in (2, 1):
            submit(core, tokens=1)
            core.step()  # takes the adapter into host memory; writes the place of a slot that had the adapter
            found, calls = steps(core)
            for own, due in zip(found[:compared], expected, strict=False):
                assert own - due == apart
                assert not due - own
            # The adapters are a source of events, and the engine asks all sources before and after a step.
            assert calls - python == Counter({"EngineAdapters.serve": 2})
            assert not python - calls
            adapted, _ = steps(core, core.adapters.digests["a"])
            assert adapted[0]["weft_cpu.low_rank.default"], "the adapter must have been used"
    finally:
        core.close()
