"""A head without a model: it plays the outputs of a script (``weft.engine.script``) over the real messages.

``ScriptedEngine`` stands where ``EngineCore`` stands elsewhere, behind the same protocol and the same loop. A
step gives each sequence whose time has come its next event. Steps are at least ``STEP_S`` apart, so that a
front is not flooded. Sampling parameters other than ``max_tokens`` and stop ids have no effect, and neither
has a grammar: what is written is played.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.common.clock import Clock, SystemClock
from weft.common.errors import InvalidRequest, Overloaded
from weft.common.log import get_logger
from weft.common.recent import Recent
from weft.config.resolved import EngineConfig
from weft.engine.engine_server import IDLE_POLL_MS, EngineServer
from weft.engine.listener import Listener
from weft.engine.script import Entry, Output, read_script
from weft.kv.prefix_log import PrefixLog
from weft.scheduler.validate import check_submit
from weft.text.model import TextModel
from weft.types.messages import (
    OLDEST,
    READINESS_SALT,
    VERSION,
    CacheMiss,
    HeadStats,
    Submit,
    TokenEvent,
    Welcome,
    ids_from_bytes,
)

log = get_logger(__name__)

STEP_S = 0.001
"""Seconds between two steps at least."""
MOST_REQUESTS = 4096
"""Requests whose entry is remembered, for choices and attempts that come later."""
SHOWN_CHARS = 60
"""Of a prompt's end, in the error of one that no entry matches."""
_PROBE = Output(ids=(0,), finish="length", error=None, chunks=(1,), delay=0.0, wait=0.0)


@dataclass(slots=True)
class _Playing:
    """A live sequence."""

    submit: Submit
    output: Output
    ids: tuple[int, ...]
    """All output tokens, those that the client has already included."""
    limit: int
    """Output tokens at which it ends with "length"."""
    num_cached: int
    due: float
    """When its next event leaves."""
    sent: int
    """Output tokens that the client has."""
    events: int = 0

    def next(self) -> TokenEvent:
        """Its next event. The last one has ``finish``."""
        first, self.events = self.events == 0, self.events + 1
        until = min(self.sent + self.output.chunk(self.events - 1), len(self.ids), self.limit)
        params = self.submit.params
        tokens = self.ids[self.sent : until]
        ends = [n for n, one in enumerate(tokens) if one in params.stop_ids]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        self.sent += len(tokens)
        self.due += self.output.delay * max(len(tokens), 1)  # the script's pace, however late this one is
        finish, error = None, None
        if ends:
            finish = "stop"
        elif self.sent >= self.limit:
            finish = "length"
        elif self.sent >= len(self.ids) and not (self.output.error and tokens):  # an error comes alone
            finish = self.output.finish
            error = None if self.output.error is None else self.output.error.info()
        return TokenEvent(
            sequence=self.submit.sequence,
            token_ids=tokens,
            num_cached=self.num_cached if first else 0,
            cache_miss=CacheMiss(reason="disabled", position=self.num_cached)
            if first and self.submit.explain
            else None,
            finish=finish,
            stop_id=tokens[-1] if ends else None,
            error=error,
        )


class ScriptedEngine:
    """Plays the entries of a script. Control only: ``clock`` is its one input besides calls."""

    sockets: Sequence[Any] = ()
    recovering = False
    transferring = False

    def __init__(
        self,
        entries: Sequence[Entry],
        text: TextModel,
        config: EngineConfig,
        vocab_size: int,
        clock: Clock | None = None,
    ) -> None:
        self.incarnation = secrets.randbits(64)
        self.steps = 0
        self._entries = entries
        self._left = [entry.times for entry in entries]
        """Prompts that each entry may still answer; None: any number."""
        self._text = text
        self._config = config
        self._vocab_size = vocab_size
        self._clock = clock or SystemClock()
        self._ends = tuple(dict.fromkeys((*text.end_ids, *config.spec.eos_ids)))
        self._live: dict[int, _Playing] = {}
        self._chosen: Recent[int, Entry] = Recent(MOST_REQUESTS)
        """Entry of each request: all its choices, and later attempts at it, share one."""
        self._prompts = 0
        """Prompts that have come."""
        self._stepped = -math.inf
        self._read_tokens = 0
        self._made_tokens = 0

    # -- what a head's protocol asks of an engine

    def submit(self, submit: Submit) -> list[TokenEvent]:
        """Begins to play. Raises InvalidRequest where no entry matches, Overloaded as a real head does."""
        kv = self._config.kv
        tokens, num_prompt = check_submit(submit, self._vocab_size, kv.max_model_len)
        if submit.sequence in self._live:
            raise InvalidRequest("a sequence of this id is live", param="sequence")
        _check_playable(submit)
        section = self._config.scheduler
        if len(self._live) >= section.max_num_seqs + section.max_queued_requests:
            raise Overloaded(f"{len(self._live)} sequences are played already; try again later")
        emitted = tuple(tokens[num_prompt:])
        if submit.salt == READINESS_SALT:
            output, cached = _PROBE, 0
        else:
            entry = self._entry_of(submit, emitted)
            output, cached = entry.output(submit.choice), min(entry.num_cached, num_prompt - 1)
        ids = self._with_end(output, submit)
        if ids[: len(emitted)] != emitted:
            raise InvalidRequest(
                "what was emitted elsewhere is not what the script plays", param="emitted_ids"
            )
        self._read_tokens += num_prompt
        self._live[submit.sequence] = _Playing(
            submit=submit,
            output=output,
            ids=ids,
            limit=min(submit.params.max_tokens, kv.max_model_len - num_prompt),
            num_cached=cached,
            due=self._clock.now() + output.wait,
            sent=len(emitted),
        )
        return []

    def finish(self, sequence: int) -> list[TokenEvent]:
        """Ends a sequence. Idempotent; unknown ids are fine."""
        if self._live.pop(sequence, None) is None:
            return []
        return [TokenEvent(sequence=sequence, finish="abort")]

    def has_work(self) -> bool:
        """Whether a sequence is live."""
        return bool(self._live)

    def stats(self) -> HeadStats:
        """Counters and gauges; a script has no blocks."""
        return HeadStats(
            steps=self.steps,
            running=len(self._live),
            prompt_tokens=self._read_tokens,
            generation_tokens=self._made_tokens,
            free_slots=max(self._config.scheduler.max_num_seqs - len(self._live), 0),
        )

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None:
        """There is no prefix cache."""
        return None

    def welcome(self, incarnation: int) -> Welcome:
        """What a front must know."""
        kv = self._config.kv
        return Welcome(
            versions=(OLDEST, VERSION),
            vocab_size=self._vocab_size,
            max_model_len=kv.max_model_len,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            num_blocks=(),
            incarnation=incarnation,
            deterministic=True,
            block_size=kv.block_size,
        )

    # -- what its loop asks

    def check(self) -> None:
        """There are no ranks to look after."""

    def hear(self) -> list[TokenEvent]:
        """Nothing comes from elsewhere."""
        return []

    def wait_ms(self) -> int:
        """Milliseconds until ``step`` has something to give, ``IDLE_POLL_MS`` at most."""
        due = min((one.due for one in self._live.values()), default=math.inf)
        seconds = max(due, self._stepped + STEP_S) - self._clock.now()
        return IDLE_POLL_MS if seconds > IDLE_POLL_MS / 1e3 else max(math.ceil(seconds * 1e3), 0)

    def step(self) -> list[TokenEvent]:
        """The events that are due. None where the last ones left just now."""
        now = self._clock.now()
        self.steps += 1  # it proves that the loop turns, also while nothing is due
        if now < self._stepped + STEP_S:
            return []
        events = [one.next() for one in self._live.values() if one.due <= now]
        if events:
            self._stepped = now
        for event in events:
            self._made_tokens += len(event.token_ids)
            if event.finish is not None:
                del self._live[event.sequence]
        return events

    def describe_speculation(self) -> None:
        """There are no drafts."""

    def close(self, failed: bool = False) -> None:
        """Nothing is open."""

    # -- which entry, which tokens

    def _entry_of(self, submit: Submit, emitted: tuple[int, ...]) -> Entry:
        """That of the prompt. Where another head began the sequence, the first one that begins with
        ``emitted``, which is then not used up.
        """
        entry = self._chosen.get(submit.request)
        if entry is not None:
            return entry
        prompt = ids_from_bytes(submit.prompt_ids)
        reads = any(entry.reads for entry in self._entries)
        text = self._text.tokenizer.decode(prompt.tolist(), skip_special_tokens=False) if reads else ""
        if not emitted:
            self._prompts += 1
        for number, entry in enumerate(self._entries):
            left = self._left[number]
            if not entry.matches(text, self._prompts):
                continue
            if emitted:
                ids = self._with_end(entry.output(submit.choice), submit)
                if ids[: len(emitted)] != emitted:
                    continue
            elif left == 0:
                continue
            elif left is not None:
                self._left[number] = left - 1
            self._chosen.put(submit.request, entry)
            return entry
        shown = f", which ends with {text[-SHOWN_CHARS:]!r}" if text else ""
        raise InvalidRequest(
            f"no entry of the script is left for prompt {self._prompts}{shown}", code="not_in_script"
        )

    def _with_end(self, output: Output, submit: Submit) -> tuple[int, ...]:
        """The output's tokens, with one that ends a turn behind them where it stops and has none."""
        stops = submit.params.stop_ids
        if output.finish != "stop" or any(one in stops for one in output.ids):
            return output.ids
        end = next((one for one in self._ends if one in stops), None)
        return output.ids if end is None else (*output.ids, end)


def _check_playable(submit: Submit) -> None:
    """Raises InvalidRequest for what no script can answer."""
    params = submit.params
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) >= 0:
            raise InvalidRequest(f"a scripted server has no logprobs: leave {name} out", param=name)
    if submit.pooling:
        raise InvalidRequest("a scripted server has no embeddings", param="input")


def run_scripted(config: EngineConfig, listener: Listener) -> None:
    """Reads the script and plays it at ``listener`` until told to stop. The entry of the head process.

    Raises ConfigError for a script that cannot be played.
    """
    try:
        text = TextModel.load(config.tokenizer_path)
        vocab_size = max(config.spec.vocab_size, text.tokenizer.vocab_size)
        entries = read_script(config.scripted, text.tokenizer, vocab_size)
    except BaseException:
        listener.close()
        raise
    engine = ScriptedEngine(entries, text, config, vocab_size)
    log.info("no model runs: %d entries of %s are played", len(entries), Path(config.scripted).name)
    EngineServer(engine, listener, wait_ms=engine.wait_ms).run()
