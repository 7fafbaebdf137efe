"""Reasons why a prompt was not found further in the prefix cache."""

from __future__ import annotations

import random
from array import array
from typing import Any

import msgspec
import pytest

from tests.scheduler.fake_runner import kv_config, submit
from tests.scheduler.harness import Rig
from weft.kv.hashing import prompt_hashes, salted_root
from weft.kv.prefix_memory import BLOCK_COST, CANDIDATES, RECORD_COST, PrefixMemory
from weft.types.messages import CacheMiss, TokenEvent, ids_from_bytes

BLOCK = 4
ROOMY: dict[str, Any] = {"blocks": 400, "slots": 8, "max_model_len": 200}


class Explaining(Rig):
    """A rig that remembers prompts and records the reported misses."""

    def __init__(self, kv: Any, depth: int = 1, most: int = 1 << 20, **section: Any) -> None:
        super().__init__(kv, depth, **section)
        if kv.enable_prefix_caching and most:
            self.scheduler._state.misses.memory = PrefixMemory(kv.block_size, most)
        self.misses: dict[int, CacheMiss] = {}

    def collect(self, events: list[TokenEvent]) -> None:
        super().collect(events)
        for event in events:
            if event.cache_miss is not None:
                assert event.sequence not in self.misses, "told twice"
                self.misses[event.sequence] = event.cache_miss

    def ask(self, number: int, prompt: list[int], **more: Any) -> tuple[str, int]:
        """Run a prompt to the end. Return the reason and the position of the cache miss."""
        self.submit(msgspec.structs.replace(submit(number, prompt, **more), explain=True))
        self.drain()
        miss = self.misses[number]
        return miss.reason, miss.position


@pytest.mark.requirement("G12")
def test_each_reason() -> None:
    rig = Explaining(kv_config(**ROOMY))
    base = list(range(20))
    assert rig.ask(0, base) == ("new", 0)
    assert rig.ask(1, base) == ("none", 16)
    assert rig.ask(2, [*base[:18], 40, 41, 42, 43]) == ("differs", 18)
    output = rig.outputs[1].tokens
    assert ids_from_bytes(rig.misses[2].theirs).tolist() == [18, 19, *output][:32]
    assert rig.ask(3, [*base, *output, 1, 2, 3, 4, 5]) == ("new", 24)  # continues after others
    assert rig.ask(4, base, salt="x") == ("salt", 0)
    assert rig.ask(5, [40, *base]) == ("new", 0)
    assert rig.ask(6, [0, 1, 2]) == ("none", 0)  # the prompt has no full block
    assert rig.ask(7, base, prompt_logprobs=0) == ("disabled", 0)
    assert rig.ask(8, [*base[:6], 49, *base[7:]]) == ("differs", 6)
    rig.check_outputs()
    rig.check_idle()


def test_misses_reveal_nothing_about_other_clients() -> None:
    rig = Explaining(kv_config(**ROOMY))
    base = list(range(20))
    rig.ask(0, base, salt="one", client=1)
    assert rig.ask(1, base, salt="two", client=2) == ("new", 0)
    assert rig.ask(2, base, salt="three", client=2) == ("salt", 0)
    assert rig.ask(3, base, salt="four", client=1) == ("salt", 0)


def test_a_difference_in_the_first_block_is_reported_for_similar_prompts() -> None:
    rig = Explaining(kv_config(**ROOMY))
    rig.ask(0, list(range(20)))
    assert rig.ask(1, [0, 1, 2, 9, *range(20)]) == ("new", 0)
    rig = Explaining(kv_config(**ROOMY))
    rig.ask(0, list(range(20)))
    assert rig.ask(1, [0, 1, 2, 3, 9, *range(20)]) == ("differs", 4)


def test_a_miss_because_of_an_eviction() -> None:
    rig = Explaining(kv_config(blocks=14, slots=2), max_num_seqs=1)
    base = list(range(20))
    rig.ask(0, base)
    for number in range(1, 6):
        rig.ask(number, [number + 30] * 30)
    assert rig.ask(9, base)[0] == "evicted"


def test_a_miss_on_blocks_in_computation() -> None:
    rig = Explaining(kv_config(**ROOMY), 1, max_num_batched_tokens=24)
    prompt = [n % 50 for n in range(100)]
    for number in range(2):
        rig.submit(msgspec.structs.replace(submit(number, prompt), explain=True))
    rig.submit(submit(2, [1]))
    rig.drain()
    assert rig.misses[0].reason == "new"
    assert rig.misses[1].reason in ("computing", "none")
    rig = Explaining(kv_config(**ROOMY), 1, max_num_batched_tokens=24, long_prefill_token_threshold=8)
    for number in range(2):
        rig.submit(msgspec.structs.replace(submit(number, prompt), explain=True))
    rig.drain()
    assert rig.misses[1].reason == "computing"


def test_a_state_that_is_not_kept() -> None:
    rig = Explaining(kv_config(states=40, stride=16, **ROOMY))
    base = list(range(40))
    rig.ask(0, base)
    reasons = {rig.ask(n, [*base[: 4 * n + 2], 45, 46, 47, 48, 49])[0] for n in range(1, 9)}
    assert "state" in reasons
    assert reasons <= {"state", "differs"}


def test_misses_are_explained_on_request_only() -> None:
    rig = Explaining(kv_config(**ROOMY), most=0)
    rig.submit(submit(0, list(range(20))))
    rig.drain()
    assert rig.misses == {}
    assert rig.ask(1, list(range(10, 30))) == ("disabled", 0)
    assert Explaining(kv_config(caching=False, **ROOMY)).ask(0, list(range(20))) == ("disabled", 0)


@pytest.mark.requirement("G12")
@pytest.mark.parametrize("depth", [1, 2])
def test_random_loads_are_explained_once_and_within_bounds(depth: int) -> None:
    reasons = set()
    for seed in range(8):
        rng = random.Random(seed)
        # The smaller limit holds about ten blocks, so that the memory of prompts must evict old prompts.
        most = rng.choice([RECORD_COST + 10 * BLOCK_COST, 1 << 20])
        states = rng.choice([0, 5])
        window = rng.choice([None, 6])
        kv = kv_config(blocks=rng.choice([14, 60]), slots=4 * depth, states=states, window=window)
        rig = Explaining(kv, depth, most, max_num_seqs=4)
        memory = rig.scheduler._state.misses.memory
        assert memory is not None
        for number in range(50):
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
            one = submit(number, prompt, salt=rng.choice(["", "", "x"]), max_tokens=rng.randint(1, 6))
            rig.submit(msgspec.structs.replace(one, explain=True))
            for _ in range(rng.randint(0, 3)):
                rig.step()
                rig.audit()
                assert memory.bytes <= most
            if rng.random() < 0.1:
                rig.finish(rng.randrange(number + 1))
            if rng.random() < 0.03:
                rig.lose()
        rig.drain()
        rig.check_outputs()
        rig.check_idle()
        for number, told in rig.outputs.items():
            assert (number in rig.misses) or told.aborted or told.given_up
            if number in rig.misses:
                assert rig.misses[number].position >= told.num_cached
        reasons |= {miss.reason for miss in rig.misses.values()}
    assert {"none", "differs", "evicted"} <= reasons


def test_the_memory_forgets_the_oldest_and_what_was_gone_on_from() -> None:
    memory = PrefixMemory(BLOCK, 3 * (RECORD_COST + 80 + 5 * BLOCK_COST))
    root = salted_root("")

    def take(number: int, ids: list[int]) -> list[bytes]:
        tokens = array("i", ids)
        hashes = prompt_hashes(tokens.tobytes(), "", BLOCK)
        memory.remember(number, "", root, tokens, hashes)
        memory.reached(number, len(ids))
        return hashes

    first = take(0, [1] * 12)
    longer = take(1, [1] * 20)  # continues the first prompt
    assert len(memory) == 1
    found = memory.having(first[0])
    assert found is not None
    assert (found.sequence, found.computed) == (1, 20)
    for number in range(2, 5):
        take(number, [number] * 20)
    assert len(memory) == 3
    assert memory.having(longer[-1]) is None
    assert memory.nearest(root, array("i", [1] * 20)) is not None
    for number in range(2, 5):
        take(number, [number] * 21)
    assert memory.bytes <= 3 * (RECORD_COST + 84 + 5 * BLOCK_COST)


def test_sequences_that_one_overtakes_are_forgotten_however_many_are_older() -> None:
    memory = PrefixMemory(BLOCK, 1 << 20)
    root = salted_root("")

    def take(number: int, blocks: int) -> None:
        tokens = array("i", [7] * (blocks * BLOCK))
        memory.remember(number, "", root, tokens, prompt_hashes(tokens.tobytes(), "", BLOCK))

    most = CANDIDATES + 1
    for number, blocks in enumerate(range(most, 0, -1)):  # the oldest prompt is remembered as well
        take(number, blocks)
    for number in range(most):
        memory.reached(number, most * BLOCK)
    for blocks in range(1, most + 2):
        take(most, blocks)
    assert len(memory) == 1
    assert memory.nearest(root, array("i", [7])) is not None
