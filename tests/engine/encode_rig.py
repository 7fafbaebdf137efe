"""Engines in this process: encoders, one engine that computes prompts, optionally one that decodes.

The rig plays the API server.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.engine.pair_rig import turn
from tests.support.slowness import deadline
from weft.common.errors import ErrorInfo, WeftError
from weft.config.resolved import EngineConfig
from weft.engine.core import EngineCore
from weft.types import messages as m
from weft.types.media_item import MediaItem, without_pixels
from weft.types.transfer import Peer, TransferKey, TransferParameters

SECONDS = deadline(90.0)
TRANSFER_S = 60.0


@dataclass
class Heard:
    """The output of one sequence, as an API server collects it."""

    submit: m.Submit
    attempt: int = 0
    tokens: list[int] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    """Logprobs of each token that came with logprobs."""
    finish: str | None = None
    error: ErrorInfo | None = None
    cached: int = 0
    parts: dict[EngineCore, str] = field(default_factory=dict)
    """Engine -> how the part of the engine in this attempt ended; "" until then."""
    why: list[str] = field(default_factory=list)
    """Error codes that ended earlier attempts."""


class EncodeFleet:
    """The engines of one test. Call ``close`` at the end."""

    def __init__(
        self,
        encoders: Sequence[EngineConfig],
        compute: EngineConfig,
        decode: EngineConfig | None = None,
        *,
        made: Sequence[EngineCore] | None = None,
    ) -> None:
        """Start the engines. ``made``: existing engines to use instead of ``encoders``."""
        self.encoders = list(made or [EngineCore(config, progress=False) for config in encoders])
        self.compute = EngineCore(compute, progress=False)
        self.decode = None if decode is None else EngineCore(decode, progress=False)
        self.heard: dict[int, Heard] = {}
        self.most_attempts = 20
        self._transfers = itertools.count(1)
        self.free = {core: core.stats().free_blocks for core in self.cores}

    @property
    def cores(self) -> list[EngineCore]:
        return [*self.encoders, self.compute, *([] if self.decode is None else [self.decode])]

    # ---- the front

    def submit(self, one: m.Submit) -> None:
        """Submit a sequence, with pixels, to the engines."""
        self.heard[one.sequence] = Heard(one)
        self._send(self.heard[one.sequence])

    def encoder_of(self, item: MediaItem, attempt: int) -> EngineCore:
        """Return the encoder of an image. Each attempt uses another encoder."""
        return self.encoders[(item.key[0] + attempt) % len(self.encoders)]

    def _send(self, heard: Heard) -> None:
        one, attempt = heard.submit, heard.attempt
        sequence = one.sequence
        here = self.compute
        far: dict[EngineCore, list[MediaItem]] = {}
        items = []
        for item in one.media:
            if attempt == 0 and one.choice:  # the first sample has the transfers
                items.append(msgspec.structs.replace(item, pixels=b""))
                continue
            encoder = self.encoder_of(item, attempt)
            key = TransferKey(next(self._transfers), attempt, encoder.incarnation)
            sends = TransferParameters(key, True, self._peer(here), TRANSFER_S)
            takes = TransferParameters(key, False, self._peer(encoder), TRANSFER_S)
            far.setdefault(encoder, []).append(msgspec.structs.replace(item, transfer=sends))
            items.append(msgspec.structs.replace(item, pixels=b"", transfer=takes))
        emitted = m.ids_to_bytes(heard.tokens)
        base = msgspec.structs.replace(one, attempt=attempt, emitted_ids=emitted, media=tuple(items))
        heard.parts = dict.fromkeys([here, *far], "")
        if self.decode is not None:
            heard.parts[self.decode] = ""
            key = TransferKey(next(self._transfers), attempt, here.incarnation)
            bare = msgspec.structs.replace(base, media=without_pixels(one.media))
            parameters = TransferParameters(key, False, Peer(*self._caches(here)), TRANSFER_S)
            self._give(self.decode, msgspec.structs.replace(bare, transfer=parameters))
            parameters = TransferParameters(key, True, Peer(*self._caches(self.decode)), TRANSFER_S)
            base = msgspec.structs.replace(base, transfer=parameters)
        plan: list[tuple[EngineCore, m.Submit]] = [(here, base)]
        for encoder, media in far.items():
            its = msgspec.structs.replace(
                base, prompt_ids=b"", emitted_ids=b"", transfer=None, media=tuple(media)
            )
            plan.append((encoder, its))
        for core, its in plan[:: -1 if sequence % 2 else 1]:
            if heard.attempt == attempt and heard.finish is None:
                self._give(core, its)

    def _give(self, core: EngineCore, its: m.Submit) -> None:
        try:
            self.take(core, core.submit(its))
        except WeftError as error:
            event = m.TokenEvent(sequence=its.sequence, finish="error", error=error.info())
            self.take(core, [event])

    def _peer(self, core: EngineCore) -> Peer:
        welcome = core.welcome(core.incarnation)
        return Peer(welcome.embeddings, welcome.incarnation)

    def _caches(self, core: EngineCore) -> tuple[str, int]:
        welcome = core.welcome(core.incarnation)
        return welcome.transfer_address, welcome.incarnation

    def take(self, core: EngineCore, events: list[m.TokenEvent]) -> None:
        attempts = {event.sequence: self.heard[event.sequence].attempt for event in events}
        for event in events:
            heard = self.heard[event.sequence]
            if core not in heard.parts or heard.parts[core]:
                continue
            if heard.attempt != attempts[event.sequence]:  # another event has begun the next attempt
                continue
            first = event.position if event.position >= 0 else len(heard.tokens)
            for number, token in enumerate(event.token_ids, first):
                if number < len(heard.tokens):
                    assert heard.tokens[number] == token
                else:
                    heard.tokens.append(token)
            if event.logprobs is not None:
                heard.values += event.logprobs.arrays()[1].tolist()
            heard.cached = max(heard.cached, event.num_cached)
            if event.finish is None:
                continue
            heard.parts[core] = event.finish
            if event.finish == "moved":
                continue
            if event.finish == "evicted":
                self._again(heard, event.error)
            else:
                heard.finish, heard.error = event.finish, event.error
                self._end(heard)

    def _again(self, heard: Heard, error: ErrorInfo | None) -> None:
        heard.why.append("" if error is None else error.code)
        self._end(heard)
        heard.attempt += 1
        assert heard.attempt < self.most_attempts, heard.why
        self._send(heard)

    def _end(self, heard: Heard) -> None:
        parts, heard.parts = heard.parts, {}
        for core, end in parts.items():
            if not end:
                core.finish(heard.submit.sequence)

    # ---- loops

    def turn(self) -> bool:
        """Run one iteration of each engine's loop. Return True if any engine computed."""
        return turn(self.cores, self.take)

    def run(self) -> None:
        """Run until all sequences and all transfers have ended."""
        until = time.monotonic() + SECONDS
        while not self.idle:
            assert time.monotonic() < until, (self.unfinished, [core.stats() for core in self.cores])
            if not self.turn() or all(core.wait_ms() for core in self.cores if core.has_work()):
                time.sleep(0.001)

    @property
    def unfinished(self) -> dict[int, Heard]:
        return {number: heard for number, heard in self.heard.items() if heard.finish is None}

    @property
    def idle(self) -> bool:
        if self.unfinished or any(core.has_work() or core.blocked for core in self.cores):
            return False
        transfers = [of for core in self.cores for of in (core.transfers, core.embeddings) if of is not None]
        return all(of.stats(None).open == 0 for of in transfers)

    def answers(self) -> dict[int, list[int]]:
        """Return the tokens of each sequence. Fail if any sequence failed."""
        assert all(heard.error is None for heard in self.heard.values()), self.heard
        return {number: heard.tokens for number, heard in self.heard.items()}

    def check_given_back(self) -> None:
        """Check that no sequence and no transfer is left in any engine."""
        for core in self.cores:
            stats = core.stats()
            assert (stats.running, stats.waiting) == (0, 0)
            if core in self.encoders:
                assert stats.kv_usage == 0.0
            else:
                assert stats.free_blocks == self.free[core]
            for transfers in (core.transfers, core.embeddings):
                assert transfers is None or not transfers.moving

    def stats(self, core: EngineCore) -> m.TransferStats:
        """Return the statistics of the embedding transfers of ``core``."""
        found: Any = core.stats().embedding_transfers
        assert found is not None
        result: m.TransferStats = found
        return result

    def close(self) -> None:
        for core in self.cores:
            core.close()
