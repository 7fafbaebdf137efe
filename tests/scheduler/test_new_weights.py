"""Sequences that run while the weights change: nobody shares the blocks that they fill afterwards."""

from __future__ import annotations

import pytest

from tests.scheduler.fake_runner import kv_config, submit
from tests.scheduler.harness import Rig
from tests.scheduler.tier_rig import TierRig
from weft.scheduler.sequence import Running

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def change(rig: Rig, name: bytes) -> int:
    """Use weights ``name`` with no step in flight. Return the computed positions of sequence 0."""
    while rig.in_flight:
        rig.commit()
    state = rig.scheduler._state
    run = state.live[0].state
    computed = int(state.columns.num_computed[run.slot]) if isinstance(run, Running) else 0
    rig.scheduler.use_weights(name)
    return computed


def stored(rig: TierRig) -> int:
    """Run to the end, and return the number of blocks on the disk."""
    rig.drain()
    rig.ask()
    while rig.under_way:
        rig.serve()
        rig.ask()
    return len(rig.disk.records)


@pytest.mark.parametrize("states", [0, 8])
@pytest.mark.parametrize("names", [(b"1",), (b"1", b""), (b"1", b"2", b"1")])
def test_blocks_of_two_versions_are_never_found(names: tuple[bytes, ...], states: int) -> None:
    """Also when the weights of before come back, and also a preempted sequence's own blocks."""
    rig = TierRig(kv_config(max_model_len=48, states=states), 1)
    rig.submit(submit(0, PROMPT, max_tokens=30))
    for _ in range(6):
        rig.step()
    pure = change(rig, names[0])
    assert pure > len(PROMPT)
    for name in names[1:]:
        for _ in range(6):
            rig.step()
        assert change(rig, name) > pure
    for _ in range(4):
        rig.step()
    state = rig.scheduler._state
    sequence = state.live[0]
    assert isinstance(sequence.state, Running)
    tokens = list(sequence.tokens)
    state.preempt(sequence, sequence.state)
    hashes, hit = state.lookup(sequence)
    first = b"" in names
    assert hit == (pure // 4 * 4 if first and not states else hit)
    assert hit <= (pure if first else 0)
    assert len(hashes) == len(tokens) // 4
    rig.drain()
    rig.submit(submit(1, tokens, max_tokens=1))
    rig.drain()
    rig.ask()
    rig.check_outputs()
    rig.check_idle()


def test_blocks_of_a_sequence_over_a_change_are_not_stored() -> None:
    rig = TierRig(kv_config(max_model_len=48), 1)
    rig.submit(submit(0, PROMPT, max_tokens=20))
    for _ in range(4):
        rig.step()
    change(rig, b"1")
    assert stored(rig) == 0
    rig.submit(submit(1, PROMPT, max_tokens=20))
    assert stored(rig) == (len(PROMPT) + 19) // 4
