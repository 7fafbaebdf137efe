"""Small models of every family, and engines with any set of features, for composition tests in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.composition import seeing
from tests.e1.rig import force_preemptions
from tests.support.checkpoints import SHAPES, spread
from tests.support.loras import make_adapter
from tests.support.mtp_models import make_mtp_checkpoint
from tests.support.pairwise import Row, covering, few_of, name
from weft import LLM, SamplingParams
from weft.bench.bench_tokenizer import write_tokenizer
from weft.config.families import load_spec
from weft.config.resolve import with_cache_dtype
from weft.config.sections.all import CacheSection, MediaSection, SchedulerSection
from weft.config.sizing.media_limits import media_limits
from weft.config.sizing.memory import bytes_for, state_bytes
from weft.engine.core import EngineCore
from weft.types.grammar import Grammar
from weft.types.plan import MoveMedia, PlaceAdapter

VOCAB, MAX_LEN, BLOCK, OUTPUT = 300, 160, 8, 16
SEQUENCES = 8
ADAPTED = r"(?<!mtp\.)layers\.({layers})\.self_attn\.(q_proj|q_b_proj|o_proj)$"
"""Modules with adapters: in every form of attention that takes adapters."""
LONGEST = 96 + OUTPUT + 4
"""A little more than the longest prompt and its answer."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 192,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

#: Form of attention -> (name of a family in transformers, configuration).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "sliding window": (
        "GptOss",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "delta": (
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            # Small states: the cache of a sequence consists mostly of entries, which run short.
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
}


def _sparse(folder: Path) -> None:
    """Write DeepSeek V4, as in the tests of the family."""
    transformers = _transformers()
    _, settings = SHAPES["deepseek_v4"]()
    torch.manual_seed(3)
    changes = {"vocab_size": VOCAB, "max_position_embeddings": 192, "o_groups": 2}
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**{**settings, **changes}))
    spread(model)
    model.to(torch.float64).save_pretrained(folder)


def _latent(folder: Path) -> None:
    """Write DeepSeek V3 with a lookahead module."""
    make_mtp_checkpoint(folder, skilled=True, vocab_size=VOCAB, max_position_embeddings=192)


def _generic(folder: Path) -> None:
    """Write CWM, which transformers computes (``implementation``)."""
    transformers = _transformers()
    changes = {
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention"],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(3)
    model = transformers.CwmForCausalLM(transformers.CwmConfig(**{**_COMMON, **changes}))
    model.to(torch.float64).save_pretrained(folder)


OTHERS = {"latent": _latent, "sparse": _sparse, "generic": _generic}
SEEING = list(seeing.FAMILIES)
"""Families whose prompts have images."""


def _transformers() -> Any:
    import transformers

    return transformers


def few_by_default(sample: list[Row], *, every_form: bool = True) -> list[Row]:
    """Return a minimal part of ``sample`` with each value of each feature, and with ``every_form`` also with
    each form of attention.

    One case has images.
    """
    text = [one for one in sample if one[0] not in SEEING]
    few = few_of([(family, {"family": family if every_form else "", **case}) for family, case in text])
    names = [(family, {**case, "family": family}) for family, case in few]
    images = next(one for one in sample if one[0] in SEEING)
    return [one for one in text if (one[0], {**one[1], "family": one[0]}) in names] + [images]


def cases_of(sample: list[Row], *, every_form: bool = True) -> list[Any]:
    """Return ``sample`` as parameters of a test. Cases outside ``few_by_default`` are slow."""
    few = few_by_default(sample, every_form=every_form)
    return [
        pytest.param(
            family,
            case,
            marks=[] if (family, case) in few else [pytest.mark.slow],
            id=f"{family}-{name(case)}",
        )
        for family, case in sample
    ]


def cases_of_forms(features_of: Callable[[str], dict[str, list[Any]]], families: Sequence[str]) -> list[Any]:
    """Return parameters of a test with each value of each feature, for each form of attention. One case of
    each form is slow, and all cases belong to the grid. ``features_of``: form -> its features."""
    of_forms = {
        family: few_of([(family, case) for case in covering(features_of(family))]) for family in families
    }
    return [
        *(
            pytest.param(*rows[0], marks=pytest.mark.slow, id=f"{family}-{name(rows[0][1])}")
            for family, rows in of_forms.items()
        ),
        *(
            pytest.param(*one, marks=pytest.mark.grid, id=f"{family}-{name(one[1])}-of its form")
            for family, rows in of_forms.items()
            for one in rows
        ),
    ]


def make_checkpoint(root: Path, family: str) -> Path:
    """Write a random checkpoint in float64 with a tokenizer, once for each ``root``. Return the folder."""
    folder = root / family.replace(", ", "-").replace(" ", "-")
    if folder.exists():
        return folder
    if family in SEEING:
        seeing.make_seeing(folder, family)
    elif family in OTHERS:
        OTHERS[family](folder)
    else:
        name, settings = FAMILIES[family]
        torch.manual_seed(3)
        config = getattr(_transformers(), f"{name}Config")(**{**_COMMON, **settings})
        model = getattr(_transformers(), f"{name}ForCausalLM")(config).to(torch.float64)
        model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB, MAX_LEN, vision=family in SEEING)
    return folder


def prompts() -> list[list[int]]:
    """Return the prompts: some are repetitive, the short ones come first, the last three share their first
    blocks."""
    rng = random.Random(7)
    shared = [rng.randrange(VOCAB - 4) for _ in range(94)]
    made = [shared[:85], [*shared, 9, 9], [*shared[:83], 5], [4, 4, 8] * 7]
    made += ([rng.randrange(VOCAB - 4) for _ in range(n)] for n in (3, 38, 12, 30))
    return sorted(made, key=len)


PROMPTS = prompts()


def asked_of(folder: Path) -> list[dict[str, Any]]:
    """Return the prompts of a family, by the folder of its checkpoint."""
    if load_spec(str(folder)).vision is not None:
        return seeing.prompts(folder)
    return [{"prompt_token_ids": ids} for ids in PROMPTS]


def distinct_images(folder: Path) -> int:
    return len({item.key for one in asked_of(folder) for item in one.get("media", ())})


def adapters_of(folder: Path) -> dict[str, str]:
    """Return name -> folder of two adapters of the attention of a checkpoint, written once."""
    made = {name: folder.with_name(f"{folder.name}-lora-{name}") for name in "ab"}
    for seed, one in enumerate(made.values()):
        if not one.exists():
            # Layers behind the last are modules that predict further tokens, and not all cases load these.
            layers = "|".join(str(layer) for layer in range(load_spec(str(folder)).layers))
            make_adapter(one, folder, ADAPTED.format(layers=layers), rank=3 + seed, seed=seed)
    return {name: str(one) for name, one in made.items()}


def params(case: dict[str, Any], count: int, stop: list[str] | None = None) -> list[SamplingParams]:
    """Return the parameters of ``count`` prompts; every second prompt is greedy."""
    return [
        SamplingParams(
            temperature=0.9 * (i % 2),
            top_p=0.95,
            seed=100 + i,
            max_tokens=OUTPUT,
            ignore_eos=True,
            n=2 if case["n"] == 2 and i % 2 else 1,
            logprobs=3 if case["logprobs"] else None,
            repetition_penalty=1.3 if case["penalties"] else 1.0,
            presence_penalty=0.4 if case["penalties"] else 0.0,
            stop=[stop[i]] if stop else [],
        )
        for i in range(count)
    ]


@dataclass
class Seen:
    """Observations of an engine."""

    unfinished: int = 0
    """Prompt rows that did not reach the end of their prompt."""
    deepest: int = 0
    placed: int = 0
    """Adapters that got a place."""
    lifted: int = 0
    """Embeddings that came back from host memory."""
    stats: Any = None
    in_flight: int = field(default=0, repr=False)


@dataclass(frozen=True)
class Answer:
    """The answer of one choice of one prompt."""

    tokens: tuple[int, ...]
    text: str
    finish: str | None
    logprobs: tuple[tuple[int, float], ...]


def implementation(folder: Path) -> str:
    """Return the value of --model-impl for the checkpoint of a family."""
    return "transformers" if folder.name == "generic" else "auto"


def engine(folder: Path, case: dict[str, Any], *, alone: bool = False) -> LLM:
    """Return an engine with the features of ``case``.

    ``alone``: one sequence at a time, with only the features that change values.
    """
    settings: dict[str, Any] = {
        "model_impl": implementation(folder),
        "dtype": "float64",
        "device": "cpu",
        "max_model_len": MAX_LEN,
        "block_size": BLOCK,
        "kv_cache_memory": "64M",
        "enable_prefix_caching": False,
        "steps_in_flight": 1,
        "max_num_seqs": 1 if alone else SEQUENCES,
    }
    if case["kv"] != "auto":
        settings["kv_cache_dtype"] = case["kv"]
    if case.get("lora"):
        settings |= {"max_loras": 2, "max_lora_rank": 4, "lora_modules": adapters_of(folder)}
    if not alone:
        settings |= {
            "enable_prefix_caching": case["prefix"],
            "steps_in_flight": case["depth"],
            "step_policy": case["policy"],
            "long_prefill_token_threshold": case["chunk"],
        }
        if case["draft"] != "none":
            settings |= {"speculative_method": case["draft"], "num_speculative_tokens": 2}
            settings["speculative_adaptive"] = False
        if case["preempt"]:
            settings["max_model_len"] = LONGEST
            settings["kv_cache_memory"] = str(tight(folder, case, BLOCK))
        settings |= room_for_images(folder, case.get("room"), 1)
    return LLM(str(folder), **(settings | case.get("disk", {})))


@cache
def _spec(folder: Path, kv: str, mtp: int) -> Any:
    section = CacheSection(kv_cache_dtype=kv)  # type: ignore[arg-type]
    return with_cache_dtype(load_spec(str(folder), None, mtp=mtp), section)


def tight(folder: Path, case: dict[str, Any], block: int) -> int:
    """Return bytes of cache so small that sequences must preempt each other, in blocks of ``block``."""
    spec = _spec(folder, case["kv"], int(case["draft"] == "mtp"))
    scheduler = SchedulerSection(
        max_num_seqs=SEQUENCES, max_num_batched_tokens=512, long_prefill_token_threshold=case["chunk"]
    )
    drafts = 0 if case["draft"] == "none" else 2
    states = state_bytes(spec, "float64", SEQUENCES * case["depth"], 1 + drafts)
    return int(1.01 * bytes_for(spec, block, "float64", 1, LONGEST, scheduler)) + states


def room_for_images(folder: Path, room: str | None, images: int) -> dict[str, Any]:
    """Return the memory settings for embeddings.

    ``room``: None or "ample"; "little" (space for ``images``, one image encoded in a step); "host" (the same,
    and more in host memory).
    """
    if room in (None, "ample"):
        return {}
    spec = _spec(folder, "auto", 0)
    limits = media_limits(spec, "float64", MAX_LEN, MediaSection())
    assert limits is not None
    least = images * limits.blocks_of(seeing.LARGEST) * limits.block_rows * limits.row_bytes
    made: dict[str, Any] = {"mm_cache_bytes": str(least), "max_encode_patches": 1}
    return made | ({"mm_host_cache_bytes": str(3 * least)} if room == "host" else {})


def run(
    folder: Path,
    case: dict[str, Any],
    stop: list[str] | None = None,
    *,
    alone: bool = False,
    grammar: Grammar | None = None,
) -> Any:
    """Return (answers by (prompt, choice), observations). ``grammar`` constrains every answer."""
    llm = engine(folder, case, alone=alone)
    seen = _watch(llm)
    if case["preempt"]:
        _preempt_some(llm)
    try:
        asked: list[Any] = asked_of(folder)
        # The prompts have no adapter, the first and the second in turn.
        lora = [(None, "a", "b")[i % 3] if case.get("lora") else None for i in range(len(asked))]
        if case["prefix"] and not alone and not case.get("disk"):
            llm.generate(asked[-3:], SamplingParams(max_tokens=1), use_tqdm=False, lora=lora[-3:])
        wanted = params(case, len(asked), stop)
        if level := case.get("sleep", 0):
            llm.generate(asked, wanted, use_tqdm=False, lora=lora)
            llm.sleep(level)
            llm.wake_up()
        outputs = llm.generate(asked, wanted, use_tqdm=False, grammar=grammar, lora=lora)
        core = llm._core
        assert core is not None
        seen.stats = core.stats()
    finally:
        llm.shutdown()
    return {(i, c.index): answer_of(c) for i, o in enumerate(outputs) for c in o.outputs}, seen


def _preempt_some(llm: LLM) -> None:
    """Preempt some sequences, because early ends may leave enough blocks."""
    core = llm._core
    assert isinstance(core, EngineCore)
    step, number = core.step, 0

    def stepped() -> Any:
        nonlocal number
        number += 1
        if number < 30:
            force_preemptions(core, number)
        return step()

    core.step = stepped  # type: ignore[method-assign]


def answer_of(choice: Any) -> Answer:
    assert choice.error is None, choice.error
    pairs = tuple(
        (token, entry.logprob) for position in choice.logprobs or () for token, entry in position.items()
    )
    return Answer(tuple(choice.token_ids), choice.text, choice.finish_reason, pairs)


def _watch(llm: LLM) -> Seen:
    seen, core = Seen(), llm._core
    assert core is not None
    forward, read = core.runner.forward, core.runner.read

    def watched_forward(plan: Any) -> Any:
        seen.in_flight += 1
        seen.deepest = max(seen.deepest, seen.in_flight)
        seen.unfinished += int((plan.prefill.sample == 0).sum())
        seen.placed += sum(isinstance(op, PlaceAdapter) for op in plan.ops)
        seen.lifted += sum(isinstance(op, MoveMedia) and op.up for op in plan.ops)
        return forward(plan)

    def watched_read(handle: Any) -> Any:
        seen.in_flight -= 1
        return read(handle)

    core.runner.forward, core.runner.read = watched_forward, watched_read  # type: ignore[method-assign]
    return seen
