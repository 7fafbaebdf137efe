"""Compiles beside the event loop: cache, deadline, one compile per source, and hostile grammars."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.grammar.rig import BACKENDS, Rig, folder, schema
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.common.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable, WeftError
from weft.grammar.guard.compile_jobs import (
    CLIENT_RUNNING,
    CLIENT_WAITING,
    MAX_CACHE_BYTES,
    MAX_RUNNING,
    GrammarService,
)
from weft.types.grammar import ContextFree, Grammar, Regex, Repeated, Text


class Made:
    """The result of a compile by ``Gate``."""

    def __init__(self, grammar: Grammar, nbytes: int) -> None:
        self.grammar = grammar
        self.nbytes = nbytes
        self.spent = False

    def matcher(self) -> Any:
        raise AssertionError


class Gate:
    """A compiler that waits for permission, for all grammars or for grammars that begin with "slow"."""

    def __init__(self, *, open_: bool = True, nbytes: int = 0) -> None:
        self.gate = threading.Event()
        self.slow = threading.Event()
        self.compiled: list[Grammar] = []
        self._nbytes = nbytes
        if open_:
            self.gate.set()

    def compile(self, grammar: Grammar) -> Any:
        assert isinstance(grammar, Text)
        self.compiled.append(grammar)
        assert (self.slow if grammar.text.startswith("slow") else self.gate).wait(deadline(60))
        if grammar == Text("bad"):
            raise InvalidRequest("bad", param="schema")
        if grammar == Text("bug"):
            raise KeyError("bug")
        return Made(grammar, self._nbytes)


@contextmanager
def serving(compiler: Any, timeout: float = 30, **keywords: Any) -> Iterator[GrammarService]:
    service = GrammarService(compiler, timeout=timeout, **keywords)
    try:
        yield service
    finally:
        service.close()
        if isinstance(compiler, Gate):
            compiler.gate.set()
            compiler.slow.set()


def test_equal_grammars_are_compiled_once_at_a_time_and_kept() -> None:
    gate = Gate(open_=False)
    with serving(gate) as service:
        waits = [service.submit(Text("a")) for _ in range(20)]
        assert not waits[0].done()
        gate.gate.set()
        assert {id(one.wait()) for one in waits} == {id(waits[0].result())}
        assert service.submit(Text("a")).done()
        assert gate.compiled == [Text("a")]


@pytest.mark.parametrize("how", ["compiled", "closed"])
def test_whoever_is_called_back_may_use_the_service(how: str) -> None:
    gate, told, free = Gate(open_=False), threading.Event(), list[bool]()
    with serving(gate) as service:
        task = service.submit(Text("a"))

        def call() -> None:
            other = threading.Thread(target=service.submit, args=(Text("b"),))
            other.start()
            other.join(deadline(2))
            free.append(not other.is_alive())
            told.set()

        task.when_ended(call)
        if how == "compiled":
            gate.gate.set()
        else:
            service.close()
        assert told.wait(deadline(60))
        assert free == [True], "the callback ran under the lock of the service"


def test_refusals_are_kept_and_defects_are_not() -> None:
    gate = Gate()
    with serving(gate) as service:
        for _ in range(2):
            with pytest.raises(InvalidRequest) as refused:
                service.compile(Text("bad"))
            assert refused.value.param == "schema"
            with pytest.raises(WeftError, match="could not be compiled"):
                service.compile(Text("bug"))
        assert gate.compiled == [Text("bad"), Text("bug"), Text("bug")]


def test_a_late_compile_is_a_504_for_who_waits_and_ends_for_the_next() -> None:
    gate = Gate(open_=False)
    with serving(gate, timeout=0.05) as service:
        for number in range(MAX_RUNNING):
            with pytest.raises(DeadlineExceeded):
                service.compile(Text(str(number)), client=number)
        with pytest.raises(DeadlineExceeded):  # the same again: no further thread
            service.compile(Text("0"))
        assert len(gate.compiled) == MAX_RUNNING
        gate.gate.set()
        until = time.monotonic() + deadline(30)
        while service.cached[0] < MAX_RUNNING and time.monotonic() < until:
            time.sleep(0.01)
        assert service.submit(Text("0")).done()
        assert service.compile(Text("0")).grammar == Text("0")  # type: ignore[attr-defined]


@pytest.mark.requirement("F16")
def test_slow_grammars_of_one_client_keep_no_other_waiting() -> None:
    gate = Gate()
    with serving(gate, timeout=deadline(60)) as service:
        slow = [service.submit(Text(f"slow {number}"), client=1) for number in range(CLIENT_WAITING)]
        for number in range(20):
            service.submit(Text(f"{number}"), client=2).wait()
        # the same grammar as one that waits in the other client's queue
        waiting = service.submit(Text("also"), client=1)
        assert not waiting.done()
        service.submit(Text("also"), client=2).wait()
        assert waiting.done()
        assert gate.compiled[:CLIENT_RUNNING] == [Text("slow 0"), Text("slow 1")]
        assert not any(one.done() for one in slow)


def test_a_client_with_too_many_grammars_is_refused_alone() -> None:
    gate = Gate()
    with serving(gate) as service:
        made = [service.submit(Text(f"slow {number}"), client=1) for number in range(CLIENT_WAITING + 9)]
        with pytest.raises(Overloaded, match="your grammars"):
            made[-1].result()
        assert service.submit(Text("a"), client=2).wait()


def test_clients_take_turns() -> None:
    gate = Gate(open_=False)
    with serving(gate) as service:
        first = [service.submit(Text(f"first {number}"), client=1) for number in range(10)]
        other = [service.submit(Text(f"other {number}"), client=2) for number in range(2)]
        third = service.submit(Text("third"), client=3)
        gate.gate.set()
        for one in [*first, *other, third]:
            one.wait()
        names = [one.text for one in gate.compiled if isinstance(one, Text)]
        assert names.index("third") <= MAX_RUNNING + 2
        assert names.index("other 1") < names.index("first 7")


@pytest.mark.requirement("F16")
def test_the_cache_is_bounded_by_what_compiled_grammars_take() -> None:
    with serving(Gate(nbytes=10 << 20)) as service:
        for number in range(20):
            service.compile(Text(str(number)))
        entries, size = service.cached
        assert entries == 3
        assert size <= MAX_CACHE_BYTES
        assert service.submit(Text("19")).done()
        assert not service._find((0, b"nothing"))


def test_a_spent_grammar_is_compiled_again() -> None:
    gate = Gate()
    with serving(gate) as service:
        made: Any = service.compile(Text("a"))
        assert service.compile(Text("a")) is made
        made.spent = True
        assert service.compile(Text("a")) is not made
        assert len(gate.compiled) == 2


def test_clients_apart_share_no_compiled_grammar() -> None:
    gate = Gate()
    with serving(gate, per_client=True) as service:
        assert service.compile(Text("a"), client=1) is not service.compile(Text("a"), client=2)
        assert service.compile(Text("a"), client=1) is service.compile(Text("a"), client=1)


@pytest.mark.requirement("F16")
@pytest.mark.slow
def test_a_hundred_thousand_grammars_take_bounded_memory() -> None:
    others = threading.active_count()  # of other tests, which may end meanwhile
    with serving(Gate(), entries=100) as service:
        most = 0
        for number in range(100_000):
            service.submit(Text(f"{number}"))
            most = max(most, threading.active_count())
        until = time.monotonic() + deadline(30)
        while not service.submit(Text("last")).done() or service.cached[0] == 0:
            assert time.monotonic() < until
            time.sleep(0.01)
        entries, size = service.cached
        assert entries <= 100
        assert size < 100 * 40
        assert most - others < 20
    with serving(Gate()) as service:
        for number in range(200):
            service.compile(Text(f"{number}" + "x" * 100_000))
        assert service.cached[1] <= MAX_CACHE_BYTES


def test_what_waits_at_the_end_is_told() -> None:
    gate = Gate(open_=False)
    with serving(gate) as service:
        waits = [service.submit(Text(str(number))) for number in range(10)]
        service.close()
        with pytest.raises(Unavailable):
            waits[-1].wait()
        with pytest.raises(Unavailable):
            service.compile(Text("x"))


def _nested(levels: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for _ in range(levels):
        result = {"type": "object", "properties": {"a": result}, "required": ["a"]}
    return result


def _powers() -> dict[str, Any]:
    return {
        "$ref": "#/$defs/d0",
        "$defs": {
            f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} if n < 40 else {"type": "integer"}
            for n in range(41)
        },
    }


def _products() -> dict[str, Any]:
    parts = [{"minimum": 1}, {"maximum": 9}, {"multipleOf": 2}]
    return {
        "type": "integer",
        "allOf": [{"anyOf": [{**part, "title": str(n)} for part in parts]} for n in range(14)],
    }


BOMBS: dict[str, Grammar] = {
    "deep": schema(_nested(60)),
    "too deep": schema(_nested(5000 // 20)),
    "wide": schema({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}),
    "too wide": schema({"type": "object", "properties": {f"p{n}": {} for n in range(9000)}}),
    "values": schema({"enum": [f"value {n}" for n in range(12_000)]}),
    "long": schema({"type": "string", "minLength": 99_999}),
    "longer": schema({"type": "string", "minLength": 10**9}),
    "items": schema({"type": "array", "minItems": 90_000, "items": {"type": "array", "minItems": 90_000}}),
    "powers": schema(_powers()),
    "products": schema(_products()),
    "cycle": schema({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}),
    "patterns": schema({"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}),
    "back and forth": schema({"type": "string", "pattern": "^(a|aa|aaa|b)*c(a|b){2000}$"}),
    "optional": Regex("(?:a?){5000}a{5000}"),
    "states": Regex("(?:(?:a|b)*c(?:a|b){1000}){100}"),
    "parentheses": Regex("(" * 5000 + "a" + ")" * 5000),
    "words": Regex("|".join(f"word{n}" for n in range(20_000))),
    "letters": Regex(r"\p{L}{1,10000}x\p{L}{1,10000}"),
    "repeats": Repeated(part=Repeated(part=Repeated(part=Text("ab"), least=4000), least=4000), least=4000),
    "rules": ContextFree("\n".join(f"r{n}: r{n + 1}" for n in range(20_000))),
    "few": ContextFree("start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(490)) + '\nr490: "a"'),
    "brackets": ContextFree("start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "gbnf": ContextFree("root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "ambiguous": ContextFree('start: start start start | "a" | '),
    "nullable": ContextFree(
        "start: " + " ".join(f"r{n}" for n in range(400)) + "\n"
        + "\n".join(f'r{n}: r{(n * 7 + 1) % 400}? "a" | r{(n * 3) % 400}*' for n in range(400))
    ),
}  # fmt: skip


@pytest.mark.requirement("F16", "G9")
@mostly_slow("backend", BACKENDS, ["llguidance"])
def test_hostile_grammars_end_in_time_and_leave_other_threads_running(backend: str) -> None:
    """Each is compiled, refused, or late: no crash, and the interpreter's lock is not held for long."""
    rig = Rig(backend, "bundled")
    stalls, stop = [0.0], threading.Event()

    def beat() -> None:
        last = time.monotonic()
        while not stop.wait(0.001):
            now = time.monotonic()
            stalls.append(now - last)
            last = now

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        for name, bomb in BOMBS.items():
            with serving(rig.compiler, timeout=deadline(5)) as service:
                start = time.monotonic()
                with suppress(InvalidRequest, DeadlineExceeded):
                    service.compile(bomb).matcher()
                assert time.monotonic() - start < deadline(5) + 1, name
    finally:
        stop.set()
        thread.join()
    assert max(stalls) < deadline(1)


def test_a_chain_of_references_overflows_no_stack() -> None:
    """Compiled by the service, then followed from a thread of the usual size."""
    chain = {
        f"d{n}": {"type": "object", "required": ["a"], "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}}
        for n in range(250)
    }
    text = json.dumps({"$ref": "#/$defs/d0", "$defs": {**chain, "d250": {"type": "integer"}}})
    code = (
        "import numpy as np\n"
        "from weft.grammar.registry import make_compiler\n"
        "from weft.grammar.guard.compile_jobs import GrammarService\n"
        "from weft.types.grammar import JsonSchema\n"
        f"compiler = make_compiler('auto', {str(folder('bundled'))!r}, 1024, (0, 2))\n"
        "service = GrammarService(compiler, timeout=60)\n"
        f"compiled = service.compile(JsonSchema(schema={text!r}))\n"
        "matcher = compiled.matcher()\n"
        "matcher.fill(np.zeros(32, np.int32))\n"
        "del matcher, compiled\n"
        "service.close()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
