"""Comparisons of ``weft verify``: greedy tokens in float64, logits in float32.

Both sides get token ids, so text processing takes no part. Weft's side runs the real scheduler and runner.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import torch

from weft.cli.reference import Reference
from weft.cli.verify import verify_tier
from weft.common.errors import ConfigError, WeftError
from weft.config import hub
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig, PoolSpec
from weft.config.sections.all import Config
from weft.config.sections.tier_section import TierSection, disk_folder
from weft.config.sizing.memory import blocks_for_one
from weft.engine.core import EngineCore
from weft.engine.server.replicas import Replicas
from weft.eval.gsm_mini import test_set
from weft.text.tokenizer import Tokenizer
from weft.types.messages import EngineStats, Submit, TokenEvent, ids_to_bytes
from weft.types.plan import AllocSlot, AppendBlocks, FreeSlot, Segment, SlotUpdate, StepPlan, column
from weft.types.sampling import TokenParams
from weft.types.tiers import TierStats

TOLERANCE = 1e-4
"""Maximum max|a-b| / max|b| of logits."""
TIE = 1e-6
"""Maximum score margin of a tie. Tied tokens may swap ranks."""

_WAIT_S = 0.01
"""Maximum seconds of one sleep while all sequences are blocked."""

Say = Callable[[str], Any]
Prompts = list[list[int]]


class Variant(NamedTuple):
    """One way to run the same prompts. No variant may change a token."""

    name: str
    config: EngineConfig
    together: bool
    """True to run all prompts at once, False to run prompts one after another."""
    engaged: Callable[[EngineStats], bool] = lambda stats: True
    """Function that returns True if the counters show that the variant took effect."""


def against_reference(config: Config, path: str, count: int, tokens: int, say: Say) -> bool:
    """Compare Weft with ``transformers``; report with ``say``.

    Return True unless there is a defect; a difference at a tie is none. Raise ConfigError without
    ``transformers``, WeftError if a prompt fails.
    """
    path = hub.resolve_model_path(path, config.model.revision)
    doubles = _resolved(config, "float64")
    prompts = make_prompts(doubles, count, tokens)
    reference = Reference(config, path, "float64")
    ours, _ = run(Variant("weft", doubles, True), prompts, tokens)
    good = greedy_agrees(doubles, reference, prompts, ours, tokens, say, "weft")
    del reference
    return _logits_agree(config, path, prompts, say) and good


def greedy_agrees(
    alone: EngineConfig, other: Reference, prompts: Prompts, found: Prompts, tokens: int, say: Say, name: str
) -> bool:
    """Compare ``found``, greedy tokens per prompt, with the tokens of ``other``; report with ``say``.

    ``name``: source of ``found`` in the report. ``alone``: one process with the same model, for the logits
    at a difference. Return True if all differences are ties.
    """
    good, equal = True, 0
    for number, (prompt, mine) in enumerate(zip(prompts, found, strict=True)):
        theirs = other.greedy(prompt, tokens)
        if mine == theirs:
            equal += 1
            continue
        # A difference is acceptable only at a tie, so compare the logits at the first difference.
        at = first_difference(mine, theirs)
        a = ForwardOnly(alone).logits(prompt + mine[:at])[-1]
        b = other.logits(prompt + theirs[:at])[-1, : a.shape[-1]]
        ids = (mine[at], theirs[at])
        good = report(say, f"prompt {number}, token {at}", ids, (a, b), (name, "transformers")) and good
    of_all = f"{equal} of {len(prompts)} prompts"
    say(f"greedy tokens in float64: {of_all} equal to transformers over {tokens} tokens")
    return good


def _logits_agree(config: Config, path: str, prompts: Prompts, say: Say) -> bool:
    """Compare logits in float32; report with ``say``.

    Return True if the largest difference is within ``TOLERANCE``.
    """
    reference = Reference(config, path, "float32")
    forward = ForwardOnly(_resolved(config, "float32"))
    worst = 0.0
    for prompt in prompts:
        a = forward.logits(prompt)
        b = reference.logits(prompt)[:, : a.shape[-1]]
        worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    good = worst <= TOLERANCE
    verdict = "within" if good else "DEFECT: over"
    say(f"logits in float32: max|a-b| / max|b| = {worst:.2e}, {verdict} {TOLERANCE:g}")
    return good


def against_self(config: Config, count: int, tokens: int, say: Say) -> bool:
    """Compare prompts run alone with other ways to run them; report with ``say``.

    Return False if a token differs without a tie, or if a variant did not take effect. Raise WeftError if a
    prompt fails.
    """
    base = _resolved(config, "float64")
    prompts = make_prompts(base, count, tokens)
    alone, *others = variants(base, prompts, tokens)
    expected, _ = run(alone, prompts, tokens)
    say(determinism(config))
    if not _preempts(base):
        say("preempted: not compared, because sequences of a model without attention need no blocks")
    good = True
    for variant in chain(others, _tier_variants(config, prompts, tokens)):
        found, stats = run(variant, prompts, tokens)
        wrong = [number for number in range(len(prompts)) if found[number] != expected[number]]
        done = f"{stats.steps} steps, {stats.mixed_steps} mixed, {stats.preemptions} preemptions"
        done += "" if stats.tier is None else f", {_of_tier(stats.tier)}"
        say(f"{variant.name}: {len(prompts) - len(wrong)} of {len(prompts)} prompts equal ({done})")
        if not variant.engaged(stats):
            say(
                f"{variant.name}: NOT ENGAGED, so the comparison proves nothing; give more --prompts or "
                "--tokens"
            )
            good = False
        for number in wrong:
            at = first_difference(found[number], expected[number])
            # Both sides share the row up to the difference, so one row shows the margin.
            row = ForwardOnly(alone.config).logits(prompts[number] + expected[number][:at])[-1]
            place = f"prompt {number}, token {at}"
            ids = (found[number][at], expected[number][at])
            good = report(say, place, ids, (row, row), (variant.name, "alone")) and good
    return good


def determinism(config: Config) -> str:
    """Return a line on bitwise determinism of logits for any batch, with the settings as given."""
    config = msgspec.structs.replace(config, tier=TierSection())
    core = EngineCore(_with(resolve(config), steps_in_flight=1), progress=False)
    try:
        return f"in {core.config.dtype} on {core.config.device}, {core.describe_determinism()}"
    finally:
        core.close()


def variants(base: EngineConfig, prompts: Prompts, tokens: int) -> list[Variant]:
    """Return the variants.

    The first runs prompts alone; the others must give the same tokens as the first.
    """
    one = _with(base, steps_in_flight=1)
    chunked = _with(base, steps_in_flight=1, long_prefill_token_threshold=7)
    two = _with(base, steps_in_flight=2, long_prefill_token_threshold=7)
    whole = _with(base, steps_in_flight=2, long_prefill_token_threshold=0)
    made = [
        Variant("alone", one, False),
        Variant("batched", one, True, lambda stats: stats.steps < len(prompts) * tokens),
        Variant("chunks of 7", chunked, True, lambda stats: stats.mixed_steps > 0),
        Variant("two steps in flight", two, True, lambda stats: stats.mixed_steps > 0),
    ]
    if _preempts(base):
        small = _small_pools(whole, prompts, tokens)
        made.append(Variant("preempted", small, True, lambda stats: stats.preemptions > 0))
    return made


def _preempts(config: EngineConfig) -> bool:
    """Return True if a sequence can lack blocks: some layers cache entries of tokens."""
    return any(pool.cache.kind != "state" for pool in config.kv.pools)


def _tier_variants(config: Config, prompts: Prompts, tokens: int) -> Iterator[Variant]:
    """Yield the variants with the disk tier of ``config``, if there is one. The caller runs each variant
    before taking the next."""
    if config.tier.kv_disk is None:
        return
    with verify_tier.new_folder(config) as tiered:
        base = resolve(tiered)
        yield Variant("stored on disk", base, True)
        loaded = verify_tier.tier_stats(lambda tier: tier.saved_tokens > 0)
        yield Variant("loaded from disk", base, True, loaded)
        if _preempts(base):
            small = _small_pools(base, prompts, tokens)
            yield Variant("loaded from disk, preempted", small, True, lambda stats: stats.preemptions > 0)
        verify_tier.damage(disk_folder(tiered.tier))
        corrupt = verify_tier.tier_stats(lambda tier: "corrupt" in tier.loads and not tier.saved_tokens)
        yield Variant("damaged on disk", base, True, corrupt)


def _of_tier(tier: TierStats) -> str:
    """Return the counters of a tier for the report."""
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(tier.loads.items())) or "none"
    return f"{sum(tier.stores.values())} blocks stored, {tier.saved_tokens} tokens loaded, loads: {outcomes}"


def _with(config: EngineConfig, **changes: Any) -> EngineConfig:
    """Return ``config`` with changed scheduler settings and a matching number of slots."""
    scheduler = msgspec.structs.replace(config.scheduler, **changes)
    kv = msgspec.structs.replace(config.kv, num_slots=scheduler.max_num_seqs * scheduler.steps_in_flight)
    return msgspec.structs.replace(config, scheduler=scheduler, kv=kv)


def _small_pools(config: EngineConfig, prompts: Prompts, tokens: int) -> EngineConfig:
    """Return ``config`` with pools for all prompts, or for the longest sequence, but not for all outputs."""
    kv = config.kv
    longest = max(map(len, prompts)) + tokens
    pools = []
    for pool in kv.pools:
        if pool.cache.kind == "state":  # running sequences use no snapshot
            pools.append(pool)
            continue

        def blocks(length: int, pool: PoolSpec = pool) -> int:
            return blocks_for_one(pool.cache, pool.block_size, length, config.scheduler)

        most = max(blocks(longest), sum(blocks(len(prompt) + 1) for prompt in prompts))
        pools.append(msgspec.structs.replace(pool, num_blocks=min(most, pool.num_blocks)))
    small = msgspec.structs.replace(kv, pools=tuple(pools), max_model_len=longest)
    # State the size, or a GPU engine would divide all of its memory again.
    size = sum(pool.nbytes(config.dtype) for pool in pools)
    cache = msgspec.structs.replace(config.cache, kv_cache_memory=str(size))
    return msgspec.structs.replace(config, kv=small, cache=cache)


def run(
    variant: Variant, prompts: Prompts, tokens: int, params: Sequence[TokenParams] | None = None
) -> tuple[list[list[int]], EngineStats]:
    """Return the tokens of every prompt and the engine's counters. Greedy without ``params`` (one per
    prompt).

    Raise WeftError if a prompt fails.
    """
    core = EngineCore(variant.config, progress=False)
    asked = [submit_of(number, prompts[number], tokens, params) for number in range(len(prompts))]
    try:
        found: dict[int, list[int]] = {}
        for together in [asked] if variant.together else [[one] for one in asked]:
            found |= generate(core, together)
        stats = core.stats()
    finally:
        core.close()
    return [found[number] for number in range(len(prompts))], stats


def submit_of(
    number: int, prompt: Sequence[int], tokens: int, params: Sequence[TokenParams] | None = None
) -> Submit:
    """Return the sequence of prompt ``number``, with the prompt's entry of ``params``, or greedy."""
    one = TokenParams(temperature=0.0, max_tokens=tokens) if params is None else params[number]
    ids = ids_to_bytes(list(prompt))
    return Submit(sequence=number, request=number, seed=number, prompt_ids=ids, params=one)


def generate(engine: EngineCore | Replicas, asked: Sequence[Submit]) -> dict[int, list[int]]:
    """Run all sequences together and return the tokens by sequence. Raise WeftError if a sequence fails."""
    found: dict[int, list[int]] = {one.sequence: [] for one in asked}

    def take(events: Sequence[TokenEvent]) -> None:
        for event in events:
            found[event.sequence] += event.token_ids
            if event.error is not None:
                raise WeftError(f"prompt {event.sequence} failed: {event.error.message}")

    for one in asked:
        take(engine.submit(one))
    while engine.has_work() or engine.blocked:
        # Blocked sequences wait for blocks of a disk, until a deadline of the scheduler.
        if not engine.has_work():
            engine.sleep(_WAIT_S)
        take(engine.poll())
        take(engine.step())
    return found


def make_prompts(config: EngineConfig, count: int, tokens: int) -> Prompts:
    """Return prompts as token ids: half random ids of various lengths, half questions if there is a
    tokenizer.

    Raise ConfigError if ``tokens`` leaves no space for a prompt of one token.
    """
    room = min(config.kv.max_model_len - tokens, 200)
    if room < 1:
        raise ConfigError(
            f"--tokens {tokens} leaves no room for a prompt in --max-model-len {config.kv.max_model_len}"
        )
    rng = random.Random(0)
    questions = _questions(config, count // 2)
    prompts = [ids[-room:] for ids in questions]
    for number in range(count - len(prompts)):
        length = min(room, (1, 5, 17, 33, 64, 100, 150, 200)[number % 8])
        prompts.append([rng.randrange(config.spec.vocab_size) for _ in range(length)])
    return prompts


def _questions(config: EngineConfig, count: int) -> Prompts:
    """Return up to ``count`` encoded questions; [] without a tokenizer."""
    if count == 0:
        return []
    try:
        tokenizer = Tokenizer.load(config.tokenizer_path)
    except ConfigError:  # random ids are sufficient
        return []
    encoded = [tokenizer.encode(problem.question) for problem in test_set(count)]
    return [ids for ids in encoded if ids and max(ids) < config.spec.vocab_size]


class ForwardOnly:
    """Logits of whole prompts through a runner, one prompt per step, without a scheduler."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = _with(config, steps_in_flight=1)
        self._runner = EngineCore(self._config, progress=False).runner
        self._step = 0

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the logits of a prompt: [len(ids), vocab] on the CPU.

        Raise ConfigError if the pools are too small for the prompt.
        """
        kv = self._config.kv
        count = len(ids)
        # Every call reuses slot 0 and blocks 1, 2, ..; the generation counts the calls.
        ops: list[SlotUpdate] = []
        step = self._step
        if step:
            ops.append(FreeSlot(slot=0, gen=step))
        ops.append(
            AllocSlot(
                slot=0,
                gen=step + 1,
                choice=0,
                seed=0,
                params=TokenParams(temperature=0.0, max_tokens=1),
                num_prompt=count,
                num_cached=0,
                token_ids=column(list(ids)),
            )
        )
        for kind, pool in enumerate(kv.pools):
            if pool.cache.kind == "state":  # blocks are snapshots: the state itself is in the slot
                continue
            blocks = -(-count // pool.block_size)
            if blocks > pool.num_blocks:
                raise ConfigError(
                    "--kv-cache-memory is too small for the prompts of verify", param="--kv-cache-memory"
                )
            ops.append(AppendBlocks(slot=0, kind=kind, blocks=column(list(range(1, blocks + 1)))))
        one = {"slot": column([0]), "gen": column([step + 1]), "start": column([0])}
        segment = Segment(
            **one, count=column([count]), logits=column([count]), sample=column([1]), next_k=column([0])
        )
        handle = self._runner.forward(StepPlan(step=step, ops=tuple(ops), prefill=segment))
        self._runner.sample(handle)
        _, logits = handle.forwarded.result()
        result: torch.Tensor = logits[:, : self._config.spec.vocab_size].clone().cpu()
        self._runner.read(handle)
        self._step += 1
        return result


def _resolved(config: Config, dtype: str) -> EngineConfig:
    """Return the resolved configuration in ``dtype``, without reuse between prompts."""
    model = msgspec.structs.replace(config.model, dtype=dtype)
    cache = msgspec.structs.replace(config.cache, enable_prefix_caching=False)
    return resolve(msgspec.structs.replace(config, model=model, cache=cache, tier=TierSection()))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the index of the first difference, or the shorter length if there is none."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def report(
    say: Say,
    place: str,
    ids: tuple[int, int],
    rows: tuple[torch.Tensor, torch.Tensor],
    names: tuple[str, str],
) -> bool:
    """Report the first difference with ``say``, with the margin between the two likeliest tokens on each
    side.

    Return True for a tie.
    """
    margins = [float(top[0] - top[1]) for top in (row.topk(2).values for row in rows)]
    tie = max(margins) < TIE
    sides = "; ".join(
        f"{name} {token} with margin {margin:.3e}"
        for name, token, margin in zip(names, ids, margins, strict=True)
    )
    say(f"{place} differs: {sides}: {'tie' if tie else 'DEFECT'}")
    return tie
