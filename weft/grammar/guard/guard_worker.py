"""A process that compiles grammars to measure the cost.

    python -m weft.grammar.guard.guard_worker CPU_SECONDS DESCRIPTOR

The first payload is a ``BackendArguments``, every other payload a grammar. A grammar that exceeds the limits
of time or memory ends only this process.
"""

from __future__ import annotations

import sys
import threading

import msgspec

from weft.common.allocator import heap_bytes
from weft.common.confine import confine
from weft.common.errors import InvalidRequest
from weft.common.log import get_logger
from weft.common.priority import LONG_S, step_back
from weft.common.workers import Answer, serve
from weft.grammar.base import GrammarCompiler
from weft.grammar.guard.guarded import MAX_BYTES, BackendArguments, Verdict
from weft.grammar.guard.stack import STACK_BYTES, with_stack
from weft.grammar.registry import make_compiler
from weft.types.grammar import Grammar

log = get_logger(__name__)

MEMORY = 2 * STACK_BYTES + (384 << 20)
"""Bytes of address space beyond the started process. An ended thread may still have its stack when the next
thread starts, hence two stacks."""


def main() -> None:
    """Run a guard worker: judge grammars from the parent process until its end, with confined memory.

    A compile of more than ``LONG_S`` seconds continues at lower priority. A crash of the compile gives a
    verdict without message.
    """

    def prepare(greeting: bytes) -> Answer:
        backend = msgspec.msgpack.decode(greeting, type=BackendArguments)
        compiler = make_compiler(backend.name, backend.tokenizer, backend.vocab_size, backend.end_ids)
        confine(MEMORY)
        decode = msgspec.msgpack.Decoder(Grammar).decode

        def answer(payload: bytes) -> tuple[bytes]:
            found: list[Verdict] = []
            thread = threading.Thread(target=lambda: found.append(judge(compiler, decode(payload))))
            with_stack(thread)
            thread.join(LONG_S)
            if thread.is_alive():
                step_back(thread)
                thread.join()
            return (msgspec.msgpack.encode(found[0] if found else Verdict(message=None)),)

        return answer

    serve(prepare, 0, float(sys.argv[1]), reports_ready=True)


def judge(compiler: GrammarCompiler, grammar: Grammar) -> Verdict:
    """Compile ``grammar`` and return the verdict: the lowered source and the memory still in use after the
    compile, or the reason of the refusal.

    An unexpected error is logged and gives a verdict with the message None. Nothing is raised.
    """
    try:
        source = compiler.lower(grammar)
        before = heap_bytes()
        compiled = compiler.build(source)
        nbytes = max(heap_bytes() - before, 0)
        del compiled
    except InvalidRequest as error:
        return Verdict(message=error.message, param=error.param, code=error.error_code)
    except MemoryError:
        nbytes = MEMORY
        source = ""
    except BaseException as unexpected:
        # A panic of the backend is a BaseException, and a thread has no caller to raise to.
        log.error("compiling a grammar failed: %s: %s", type(unexpected).__name__, unexpected)
        return Verdict(message=None)
    if nbytes > MAX_BYTES:
        message = f"the compiled grammar takes more than {MAX_BYTES >> 20} MB; make it simpler"
        return Verdict(message=message, code="grammar_too_large")
    return Verdict(source=source, nbytes=nbytes)


if __name__ == "__main__":
    main()
