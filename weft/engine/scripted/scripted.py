"""An engine process without a model: plays the outputs of a script (``weft.engine.scripted.script``) over the
real messages.

``ScriptedEngine`` replaces ``EngineCore`` behind the same protocol and the same loop. A step returns the next
event of each due sequence. Steps are at least ``STEP_S`` apart, to avoid flooding an API server. Sampling
parameters other than ``max_tokens`` and stop ids have no effect, and a grammar has none either.
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
from weft.config.names import engine_identity
from weft.config.resolved import EngineConfig
from weft.engine.scripted.script import Entry, Output, read_script
from weft.engine.server.engine_server import IDLE_POLL_MS, EngineServer
from weft.engine.server.listener import Listener
from weft.kv.prefix_log import PrefixLog
from weft.scheduler.validate import check_submit
from weft.text.model import TextModel
from weft.types.messages import (
    OLDEST,
    READINESS_SALT,
    VERSION,
    CacheMiss,
    EngineStats,
    Submit,
    TokenEvent,
    Welcome,
    ids_from_bytes,
)
from weft.types.tier_flush import FlushTier

log = get_logger(__name__)

STEP_S = 0.001
"""Minimum seconds between two steps with events."""
MOST_REQUESTS = 4096
"""Maximum requests with a remembered entry, for further choices and later attempts."""
SHOWN_CHARS = 60
"""Characters shown of the end of an unmatched prompt, in the error."""
_PROBE = Output(ids=(0,), finish="length", error=None, chunks=(1,), delay=0.0, wait=0.0)


@dataclass(slots=True)
class _Playing:
    """A live sequence."""

    submit: Submit
    output: Output
    ids: tuple[int, ...]
    """All output tokens, including tokens already sent to the client."""
    limit: int
    """Number of output tokens at which the sequence ends with "length"."""
    num_cached: int
    due: float
    """Time at which the next event leaves."""
    sent: int
    """Number of output tokens sent to the client."""
    events: int = 0

    def next(self) -> TokenEvent:
        """Return the next event and advance ``sent``, ``events`` and ``due``.

        The last event has ``finish``. A stop token or the token limit ends the output earlier.
        """
        first, self.events = self.events == 0, self.events + 1
        until = min(self.sent + self.output.chunk(self.events - 1), len(self.ids), self.limit)
        params = self.submit.params
        tokens = self.ids[self.sent : until]
        ends = [n for n, one in enumerate(tokens) if one in params.stop_ids]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        self.sent += len(tokens)
        # From the old due time: keeps the script's pace after a late event.
        self.due = _on_beat(self.due + self.output.delay * max(len(tokens), 1), self.output.beat)
        finish, error = None, None
        if ends:
            finish = "stop"
        elif self.sent >= self.limit:
            finish = "length"
        # An error is a separate event.
        elif self.sent >= len(self.ids) and not (self.output.error and tokens):
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
    """Plays the entries of a script. Pure control: ``clock`` is the only input besides calls."""

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
        """``entries``: the script.

        ``text``: the model's text files. ``vocab_size``: number of token ids allowed in prompts. ``clock``:
        default: the system's.
        """
        self.incarnation = secrets.randbits(64)
        self.steps = 0
        self._entries = entries
        self._left = [entry.times for entry in entries]
        """Prompts left for each entry; None: unlimited."""
        self._text = text
        self._config = config
        self._vocab_size = vocab_size
        self._clock = clock or SystemClock()
        self._ends = tuple(dict.fromkeys((*text.end_ids, *config.spec.eos_ids)))
        self._live: dict[int, _Playing] = {}
        self._chosen: Recent[int, Entry] = Recent(MOST_REQUESTS)
        """Entry of each request. All choices of a request, and later attempts, share one entry."""
        self._prompts = 0
        """Number of prompts received."""
        self._stepped = -math.inf
        self._read_tokens = 0
        self._made_tokens = 0
        self._resets = 0

    # -- the interface for `EngineProtocol`

    def submit(self, submit: Submit) -> list[TokenEvent]:
        """Start to play an output and return no events. Uses up one use of the chosen entry.

        Raises InvalidRequest where no entry matches, the id is running, or the script differs from the
        emitted tokens. Raises Overloaded as a real engine process does.
        """
        kv = self._config.kv
        tokens, num_prompt = check_submit(submit, self._vocab_size, kv.max_model_len)
        if submit.sequence in self._live:
            raise InvalidRequest("a sequence with this id is running", param="sequence")
        _check_playable(submit)
        section = self._config.scheduler
        if len(self._live) >= section.max_num_seqs + section.max_queued_requests:
            raise Overloaded(f"{len(self._live)} sequences are running already; try again later")
        emitted = tuple(tokens[num_prompt:])
        if submit.salt == READINESS_SALT:
            output, cached = _PROBE, 0
        else:
            entry = self._entry_of(submit, emitted)
            output, cached = entry.output(submit.choice), min(entry.num_cached, num_prompt - 1)
        # A continued sequence carries tokens emitted by another engine process; the script must agree with
        # such tokens.
        ids = self._with_end(output, submit)
        if ids[: len(emitted)] != emitted:
            raise InvalidRequest("the tokens emitted so far differ from the script", param="emitted_ids")
        self._read_tokens += num_prompt
        self._live[submit.sequence] = _Playing(
            submit=submit,
            output=output,
            ids=ids,
            limit=min(submit.params.max_tokens, kv.max_model_len - num_prompt),
            num_cached=cached,
            due=_on_beat(self._clock.now() + output.wait, output.beat),
            sent=len(emitted),
        )
        return []

    def finish(self, sequence: int) -> list[TokenEvent]:
        """End a sequence and return the abort event. Idempotent; unknown ids return no events."""
        if self._live.pop(sequence, None) is None:
            return []
        return [TokenEvent(sequence=sequence, finish="abort")]

    def has_work(self) -> bool:
        """Return True if a sequence is live."""
        return bool(self._live)

    def stats(self) -> EngineStats:
        """Return counters and gauges. A script has no blocks."""
        return EngineStats(
            steps=self.steps,
            running=len(self._live),
            prompt_tokens=self._read_tokens,
            generation_tokens=self._made_tokens,
            free_slots=max(self._config.scheduler.max_num_seqs - len(self._live), 0),
            prefix_resets=self._resets,
        )

    def flush(self, asked: FlushTier) -> None:
        """Count the flush. A script has no cache."""
        self._resets += 1

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None:
        """Return None: there is no prefix cache."""
        return None

    def welcome(self, incarnation: int) -> Welcome:
        """Return the ``Welcome`` message, a description of the engine for API servers."""
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

    # -- the interface for the step loop

    def check(self) -> None:
        """Do nothing: there are no ranks."""

    def poll(self) -> list[TokenEvent]:
        """Return no events: there is no external input."""
        return []

    def wait_ms(self) -> int:
        """Return the milliseconds until ``step`` has an event, at most ``IDLE_POLL_MS``."""
        due = min((one.due for one in self._live.values()), default=math.inf)
        seconds = max(due, self._stepped + STEP_S) - self._clock.now()
        return IDLE_POLL_MS if seconds > IDLE_POLL_MS / 1e3 else max(math.ceil(seconds * 1e3), 0)

    def step(self) -> list[TokenEvent]:
        """Return the due events, end the finished sequences and count a step.

        Empty within ``STEP_S`` seconds after the last events.
        """
        now = self._clock.now()
        self.steps += 1  # counted also without events: heartbeats report `steps` as proof of progress
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
        """Return None: there are no drafts."""

    def close(self, failed: bool = False) -> None:
        """Do nothing: no resource is open."""

    # -- choice of entry and tokens

    def _entry_of(self, submit: Submit, emitted: tuple[int, ...]) -> Entry:
        """Return the entry for the prompt of ``submit``: the known entry of the request, else the first
        match, which is used up once and remembered. Raises InvalidRequest if no entry is left.

        If another engine process began the sequence, take the first matching entry whose output begins with
        ``emitted``, and do not count the use.
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
            # A continued sequence must find the entry that another engine process played. The entry may be
            # used up there, not here.
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
        """Return the output's tokens. If a "stop" output has no stop token, append an end token from the stop
        ids.
        """
        stops = submit.params.stop_ids
        if output.finish != "stop" or any(one in stops for one in output.ids):
            return output.ids
        end = next((one for one in self._ends if one in stops), None)
        return output.ids if end is None else (*output.ids, end)


def _check_playable(submit: Submit) -> None:
    """Raise InvalidRequest for logprobs and embeddings, which a script cannot provide."""
    params = submit.params
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) >= 0:
            raise InvalidRequest(f"a scripted server has no logprobs: leave {name} out", param=name)
    if submit.pooling:
        raise InvalidRequest("a scripted server has no embeddings", param="input")


def run_scripted(config: EngineConfig, listener: Listener) -> None:
    """Read the script and play the script at ``listener`` until shutdown.

    The entry point of the engine process. Raises ConfigError for an invalid script, after closing
    ``listener``.
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
    identity = engine_identity(config)
    EngineServer(engine, listener, wait_ms=engine.wait_ms, identity=identity, flush=engine.flush).run()


def _on_beat(due: float, beat: float) -> float:
    """Return the first multiple of ``beat`` from ``due`` on; ``due`` for beat 0."""
    return math.ceil(due / beat - 1e-6) * beat if beat else due
