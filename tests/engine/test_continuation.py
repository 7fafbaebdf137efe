"""A decode group is lost, or returns a sequence, at each token. The client gets the undisturbed text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.composition.rig import BLOCK, MAX_LEN, PROMPTS, make_checkpoint
from tests.support.fleet_engine import FleetEngine, start_llm
from tests.support.slow import mostly_slow
from weft import LLM, SamplingParams
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.text.choice import Choice

PROMPT = {"prompt_token_ids": PROMPTS[3]}
TOKENS = 14
FAMILIES = [
    "full",
    pytest.param("delta", marks=pytest.mark.slow),
    pytest.param("latent", marks=pytest.mark.grid),
]


class Client:
    """The output of one client, piece by piece."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.llm = llm
        self.engine: Any = llm._core
        assert isinstance(self.engine, FleetEngine)
        self.pieces: list[str] = []
        self.tokens = 0
        heard = Choice.on_event

        def hear(choice: Choice, event: Any) -> Any:
            delta = heard(choice, event)
            if delta is not None:
                self.pieces.append(delta.text)
                self.tokens += len(delta.token_ids)
            return delta

        monkeypatch.setattr(Choice, "on_event", hear)

    def ask(self, stop: list[str], disturb: Callable[[], bool] | None = None) -> tuple[Any, ...]:
        """Run a request. Return (text, tokens, finish reason, logprobs).

        ``disturb`` is called before each iteration until it returns True.
        """
        self.pieces, self.tokens = [], 0
        turn, done = self.engine.turn, disturb is None

        def turned() -> bool:
            nonlocal done
            done = done or disturb is None or disturb()
            return turn()

        self.engine.turn = turned
        try:
            params = SamplingParams(
                temperature=0.9, seed=5, max_tokens=TOKENS, ignore_eos=True, logprobs=2, stop=stop
            )
            (output,) = self.llm.generate([PROMPT], params, use_tqdm=False)
        finally:
            self.engine.turn = turn
        assert done, "nothing was disturbed"
        choice = output.outputs[0]
        assert choice.error is None
        assert "".join(self.pieces) == choice.text
        rows = [{token: entry.logprob for token, entry in row.items()} for row in choice.logprobs]
        return choice.text, choice.token_ids, choice.finish_reason, rows


@pytest.fixture(params=FAMILIES)
def client(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("continuation"), request.param)
    common = {"model": str(folder), "dtype": "float64", "device": "cpu", "max_model_len": MAX_LEN}
    common |= {"kv_cache_memory": "16M", "max_num_seqs": 4, "threads": 1, "block_size": BLOCK}
    groups = [resolve(from_keywords({**common, "role": role})) for role in ("prefill", "decode")]
    with pytest.MonkeyPatch.context() as patch, start_llm(patch, groups, **common) as llm:
        yield Client(llm, patch)


@pytest.mark.requirement("E33")
@mostly_slow("how", ["evict", "lose"], ["lose"])
def test_a_client_gets_the_same_text_wherever_the_decode_group_was_lost(client: Client, how: str) -> None:
    free = client.ask([])[0]
    assert len(free) > 12
    # The first stop string begins in many places but never completes. The second one ends the answer.
    stop = [f"{free[len(free) // 3 :][:3]}\x01", free[-6:-3]]
    expected = client.ask(stop)
    assert expected[2] == "stop"
    held = _most_held(client.pieces)
    disturb = client.engine.return_to_router if how == "evict" else client.engine.lose_decode
    first = 1 if how == "evict" else 0  # no sequence runs at the decode group before the first token
    failovers = client.engine.fleet.failovers
    for index in range(first, len(expected[1])):
        found = client.ask(stop, lambda index=index: client.tokens >= index and disturb())
        assert _alike(found, expected), index
    assert held, "no text was ever held back"
    if how == "lose":
        assert client.engine.fleet.failovers > failovers
    else:
        moved = client.engine.cores("decode")[0].stats().transfers
        assert moved.returns == len(expected[1]) - first
    client.engine.settle()


def _alike(found: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    if found[:3] != expected[:3]:
        return False
    for mine, other in zip(found[3], expected[3], strict=True):
        if mine.keys() != other.keys() or any(abs(mine[token] - other[token]) > 1e-5 for token in mine):
            return False
    return True


def _most_held(pieces: list[str]) -> int:
    """Return the longest run of tokens without text for the client."""
    most = run = 0
    for piece in pieces:
        run = 0 if piece else run + 1
        most = max(most, run)
    return most
