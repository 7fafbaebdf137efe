"""Grammars through whole engines: compiled beside the loop, over processes, prefill and decode apart, when
heads are lost.

Every output is checked against its grammar by a parser of its own: ``re``, ``json``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.composition.rig import BLOCK, MAX_LEN, PROMPTS
from tests.composition.rig import make_checkpoint as with_tokenizer
from tests.e0.rig import make_engine, submit
from tests.engine.test_engine_server import Served
from tests.support.automata import Automata, Automaton, named
from tests.support.checkpoints import make_checkpoint
from tests.support.fleet_engine import FleetEngine, start_llm
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft import LLM, AsyncLLM, SamplingParams
from weft.common.errors import InvalidRequest
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.engine.core import EngineCore
from weft.engine.grammars import GrammarSource, ModelGrammars
from weft.grammar import build
from weft.types import messages as m
from weft.types.grammar import Grammar, Regex
from weft.types.sampling import TokenParams

DEADLINE = deadline(60.0)
WORDS = r"[a-z]{2,9}( [a-z]{2,9}){0,4}\."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
COMMON = {"kv_cache_memory": "64M", "threads": 1, "dtype": "float64"}


def is_object(text: str) -> bool:
    made = json.loads(text)
    return (
        set(made) == {"name", "age", "kind"}
        and len(made["name"]) <= 12
        and type(made["age"]) is int
        and 0 <= made["age"] <= 120
        and made["kind"] in ("cat", "dog")
    )


PROMPT_TEXTS = ["Once upon a time", "The cat", "Tom had a dog", "Lily saw", "One day", "Ben ran"]


def grammars() -> list[Grammar | None]:
    schema = build.json_schema(SCHEMA, compact=True)
    return [schema, Regex(WORDS), None, schema, Regex(WORDS), Regex("[0-9]{3}-[0-9]{4}")]


def ask(llm: LLM, n: int = 1) -> list[tuple[str, str | None]]:
    params = [
        SamplingParams(temperature=(0.0, 0.9)[i % 2], seed=i, max_tokens=60, n=n if i == 1 else 1)
        for i in range(len(PROMPT_TEXTS))
    ]
    outputs = llm.generate(PROMPT_TEXTS, params, use_tqdm=False, grammar=grammars())
    made = []
    for number, output in enumerate(outputs):
        for choice in output.outputs:
            assert choice.error is None
            check_text(number, choice.text, choice.finish_reason)
            made.append((choice.text, choice.finish_reason))
    return made


def check_text(number: int, text: str, finish: str | None) -> None:
    if number == 2:
        return
    assert finish == "stop", text
    if number in (0, 3):
        assert is_object(text), text
    elif number == 5:
        assert re.fullmatch("[0-9]{3}-[0-9]{4}", text), text
    else:
        assert re.fullmatch(WORDS, text), text


@pytest.fixture(scope="module")
def expected() -> list[tuple[str, str | None]]:
    """Outputs of one sequence after the other, with one step in flight."""
    with LLM("spool-text", max_num_seqs=1, **COMMON) as llm:
        return ask(llm, 3)


LAYOUTS: dict[str, dict[str, Any]] = {
    "deep, chunks": {"steps_in_flight": 2, "long_prefill_token_threshold": 4},
    "drafts": {"speculative_method": "ngram", "num_speculative_tokens": 3, "speculative_adaptive": False},
    "two processes, deep, drafts": {
        "tensor_parallel_size": 2,
        "steps_in_flight": 2,
        "speculative_method": "ngram",
        "num_speculative_tokens": 2,
        "speculative_adaptive": False,
    },
    "two replicas": {"data_parallel_size": 2},
}


@mostly_slow("how", LAYOUTS, ["two processes, deep, drafts"])
def test_outputs_match_their_grammars_and_are_those_of_one_alone(
    how: str, expected: list[tuple[str, str | None]]
) -> None:
    with LLM("spool-text", max_num_seqs=8, **COMMON, **LAYOUTS[how]) as llm:
        assert ask(llm, 3) == expected
        stats = llm.stats()
        assert stats.constrained_steps > 0
        assert stats.mask_seconds > 0
        assert stats.grammars_compiled == 7
        assert stats.grammar_errors == 0
        assert sum(stats.drafts_accepted) > 0 or "speculative_method" not in LAYOUTS[how]


def test_bad_grammars_and_those_that_leave_nothing_are_errors_that_say_so() -> None:
    with LLM("spool-text", **COMMON) as llm:

        def refused(grammar: Any, **params: Any) -> InvalidRequest:
            with pytest.raises(InvalidRequest) as caught:
                llm.generate("x", SamplingParams(max_tokens=30, **params), use_tqdm=False, grammar=grammar)
            return caught.value

        for _ in range(2):  # the second time it is known at once
            assert "invalid regex" in refused(Regex("a(?=b)")).message
        stuck = refused(Regex("ab"), min_tokens=9)
        assert (stuck.error_code, stuck.param) == ("no_token_allowed", "min_tokens")
        stuck = refused(Regex("[0-9]+"), bad_words=list("0123456789"))
        assert (stuck.error_code, stuck.param) == ("no_token_allowed", "bad_words")
        stuck = refused(Regex("[0-9]+"), allowed_token_ids=[llm.tokenizer.encode("a")[-1]])
        assert (stuck.error_code, stuck.param) == ("no_token_allowed", "allowed_token_ids")
        assert "weft.types.grammar" in refused("[0-9]").message
        assert "1 prompts but 2 grammars" in refused([None, None]).message
        whole = llm.generate(
            "x", SamplingParams(max_tokens=90, ignore_eos=True), use_tqdm=False, grammar=Regex("[a-z]{30}")
        )[0].outputs[0]
        assert (len(whole.text), whole.finish_reason) == (30, "stop")
        assert llm.stats().grammar_errors == 5


def test_conversations_and_streams_take_grammars_too() -> None:
    message = [{"role": "user", "content": "Hi"}]
    with LLM("spool-text", **COMMON) as llm:
        made = llm.chat(message, SamplingParams(max_tokens=30), use_tqdm=False, grammar=Regex(WORDS))
        assert re.fullmatch(WORDS, made[0].outputs[0].text)

    async def stream() -> str:
        async with AsyncLLM("spool-text", **COMMON) as llm:
            text = ""
            params = SamplingParams(max_tokens=30, seed=2)
            async for output in llm.generate("Hi", params, grammar=Regex(WORDS)):
                text = output.outputs[0].text
            for _ in range(2):
                with pytest.raises(InvalidRequest, match="invalid regex"):
                    async for _output in llm.generate("Hi", params, grammar=Regex("a(?=b)")):
                        pass
            return text

    assert re.fullmatch(WORDS, asyncio.run(stream()))


# ---- beside the loop


class Slow:
    """``ModelGrammars`` whose compiles wait until ``go``."""

    def __init__(self, made: ModelGrammars) -> None:
        self.made, self.go = made, threading.Event()
        compiler = made._compiler
        compile_ = compiler.compile

        def wait(grammar: Grammar) -> Any:
            assert self.go.wait(DEADLINE)
            return compile_(grammar)

        compiler.compile = wait  # type: ignore[method-assign]


@pytest.mark.requirement("G9")
def test_a_compile_stops_nobody_else_and_wakes_the_loop_when_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop sleeps on the compile's descriptor, though its sleep has no end."""
    monkeypatch.setattr("weft.engine.server.engine_server.IDLE_POLL_MS", None)
    folder = with_tokenizer(tmp_path, "full")
    config = resolve(from_keywords({"model": str(folder), "device": "cpu", "max_model_len": MAX_LEN}))
    slow = Slow(ModelGrammars(config))
    core = EngineCore(config, progress=False, grammars=GrammarSource(lambda: slow.made))
    served = Served(core, f"ipc://{tmp_path}/head")
    front = served.front()
    params = TokenParams(temperature=0.0, max_tokens=8)
    try:
        front.send(submit(1, [1, 2, 3], params, request=1, grammar=Regex("[0-9]{2}")))
        front.send(submit(2, [1, 2, 3], params, request=2))
        assert front.events(2)[-1].finish == "length"
        assert core.stats().constrained_steps == 0
        slow.go.set()
        events = front.events(1)
        tokens = [token for event in events for token in event.token_ids]
        assert events[-1].finish == "stop"
        assert 1 <= len(tokens) <= 3
    finally:
        slow.go.set()
        served.engine._protocol.stopped = True
        front.send(m.Drain())  # wakes the loop
        served.close()


def test_a_second_close_leaves_the_descriptors_of_others_alone() -> None:
    source = GrammarSource(lambda: pytest.fail("no grammar came"))
    (wakeup,) = source.sockets
    null = os.open(os.devnull, os.O_RDONLY)
    source.close()
    try:
        os.dup2(null, wakeup)  # another file now has the number
        source.close()
        os.close(wakeup)
    finally:
        os.close(null)


def test_a_compile_that_was_noticed_before_it_rang_lets_the_loop_sleep(tmp_path: Path) -> None:
    engine, _ = make_engine(make_checkpoint(tmp_path, "llama"))
    (wakeup,) = engine.grammars.sockets
    poller = zmq.Poller()
    poller.register(wakeup, zmq.POLLIN)
    engine.grammars._ring()
    assert poller.poll(deadline(1) * 1e3)
    assert engine.poll() == []
    assert not poller.poll(0)
    engine.close()
    engine.grammars._ring()  # one that ends after the engine


def test_one_that_is_cancelled_while_it_compiles_is_forgotten(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    automata = Automata([Automaton(({1: 0},), frozenset())], turns=3)
    engine, _ = make_engine(folder, grammars=automata.source())
    params = TokenParams(temperature=0.0, max_tokens=4)
    assert engine.submit(submit(1, [1, 2], params, request=1, grammar=named(0))) == []
    assert engine.blocked
    (event,) = engine.finish(1)
    assert event.finish == "abort"
    for _ in range(9):
        assert engine.poll() == []
    assert not engine.blocked
    assert not automata.matchers
    # The same id again, as a later attempt has it.
    engine.submit(submit(1, [1, 2], params, request=1, grammar=named(0)))
    until, tokens = time.monotonic() + DEADLINE, []
    while engine.has_work() or engine.blocked:
        assert time.monotonic() < until
        tokens += [token for event in (*engine.poll(), *engine.step()) for token in event.token_ids]
    assert tokens == [1, 1, 1, 1]
    engine.close()
    assert automata.closed


# ---- prefill and decode apart, lost heads


class Client:
    """One request to a fleet of groups with faults, and the output of the request."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.engine: Any = llm._core
        assert isinstance(self.engine, FleetEngine)

    def ask(self, grammar: Grammar, after: int = 0, disturb: Callable[[], bool] | None = None) -> Any:
        """``disturb``: called from the turn on at which ``after`` tokens were made, until it did."""
        turn, begin = self.engine.turn, self._made()
        done = disturb is None

        def turned() -> bool:
            nonlocal done
            if not done and self._made() - begin >= after:
                assert disturb is not None
                done = disturb()
            return bool(turn())

        self.engine.turn = turned
        try:
            params = SamplingParams(temperature=0.9, seed=5, max_tokens=40)
            prompt = {"prompt_token_ids": PROMPTS[3]}
            (output,) = self.llm.generate([prompt], params, use_tqdm=False, grammar=grammar)
        finally:
            self.engine.turn = turn
        assert done, "nothing was disturbed"
        return output.outputs[0]

    def _made(self) -> int:
        return int(self.engine.stats().generation_tokens)


def settings(folder: Path) -> dict[str, Any]:
    common = {"model": str(folder), "dtype": "float64", "device": "cpu", "max_model_len": MAX_LEN}
    return common | {"kv_cache_memory": "16M", "max_num_seqs": 4, "threads": 1, "block_size": BLOCK}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tmp_path_factory.mktemp("apart"), "full")


@pytest.fixture
def client(folder: Path) -> Iterator[Client]:
    common = settings(folder)
    groups = [resolve(from_keywords({**common, "role": role})) for role in ("prefill", "decode")]
    with pytest.MonkeyPatch.context() as patch, start_llm(patch, groups, **common) as llm:
        yield Client(llm)


PATTERN = "(?:[a-z]{3}[0-9]){4,9}!"


@pytest.mark.requirement("E33", "G8")
@pytest.mark.slow
def test_prefill_and_decode_apart_and_continued_after_each_token(client: Client, folder: Path) -> None:
    grammar = Regex(PATTERN)
    with LLM(**settings(folder)) as llm:
        params = SamplingParams(temperature=0.9, seed=5, max_tokens=40)
        prompt = {"prompt_token_ids": PROMPTS[3]}
        expected = llm.generate([prompt], params, use_tqdm=False, grammar=grammar)[0].outputs[0]
    assert re.fullmatch(PATTERN, expected.text), expected.text
    first = client.ask(grammar)
    assert (first.text, first.token_ids) == (expected.text, expected.token_ids)
    prefill, decode = (client.engine.cores(role)[0].stats() for role in ("prefill", "decode"))
    assert prefill.constrained_steps == 1, "the first token is masked where it is computed"
    assert decode.constrained_steps >= len(expected.token_ids) - 1
    for how in (client.engine.return_to_router, client.engine.lose_decode):
        for after in range(2, len(expected.token_ids), 3):
            found = client.ask(grammar, after, how)
            assert (found.text, found.token_ids) == (expected.text, expected.token_ids), after
            assert found.finish_reason == "stop"
    assert client.engine.fleet.failovers > 0
    client.engine.settle()


def test_a_grammar_that_cannot_be_compiled_ends_a_pair(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="invalid regex"):
        client.ask(Regex("a(?=b)"))
    client.engine.settle()
    assert re.fullmatch("[0-9]{4}", client.ask(Regex("[0-9]{4}")).text)
