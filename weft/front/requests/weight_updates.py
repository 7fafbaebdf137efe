"""New weights for all engine processes of one model: the update under way, and the versions.

    join ──► every rank is in the group of a trainer (gloo, nccl)
    start ──► add source, or receive, .. ──► finish: StageWeights to all ──all read them──► UseWeights to all
                                                         └── one refuses: DropWeights to all

A sleep of level 2 frees the weights. The next complete update fills the weights again. Without an update,
``restore`` loads the weights from before the sleep as a new version with the same label.

New attempts go only to engine processes with the newest version (``Router.weights``). A process that starts
again, or that lost ranks between the two messages, gets all updates since the last complete update.

With several API servers, one API server carries out the updates (the carrier, ``Supervisor.carrier``). The
others know the versions. When the carrier ends, another API server becomes the carrier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from weft.common.errors import InvalidRequest, ReportedError, Unavailable, WeftError
from weft.common.log import get_logger
from weft.config.resolved import EngineConfig
from weft.control.fleet.instances import Instance
from weft.control.links.links import Links
from weft.front.siblings import Siblings
from weft.store.fixed_weights import check_sleep, former_updates
from weft.store.new_weights import MOST_FILES, SHARED
from weft.store.shared_files import SharedFiles, new_token, shared_name
from weft.types.messages import RECEIVE_SINCE, SLEEP_SINCE, ToWeights, common_version
from weft.types.weights import (
    AnnouncedTensors,
    DropWeights,
    FreeMemory,
    JoinTrainer,
    ReceiveWeights,
    StageWeights,
    TrainerGroup,
    UseWeights,
    WeightsChanged,
    WeightsUpdate,
)

log = get_logger(__name__)

DEFAULT = "default"
"""Label of the weights of the start."""
STAGE_S = 900.0
"""Maximum seconds until every engine process has read new weights."""
USE_S = 180.0
"""Maximum seconds until every engine process uses new weights."""
JOIN_S = 60.0
"""Seconds that an engine process may take to answer after the time-out of a trainer's group."""
POLL_S = 0.01
FOLLOW_S = 1.0
"""Seconds between two searches for engine processes without the newest weights."""
MOST_LABELS = 1024
"""Maximum number of versions with a remembered label."""


class UpdatesState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the weights of a model, as exchanged between API servers."""

    stamp: int
    """Number of changes. The highest stamp counts."""
    number: int
    """Version for new requests."""
    labels: dict[int, str]
    history: tuple[WeightsUpdate, ...]
    """Updates since the last complete one, in order."""


class WeightUpdates:
    """The weights of one model, as one API server knows them. Used from the event loop."""

    def __init__(self, config: EngineConfig, links: Links) -> None:
        self._config, self._links = config, links
        self._labels: dict[int, str] = {0: DEFAULT}
        self._files: list[str] | None = None
        """Files of the update under way; None without one."""
        self._partial = False
        self._busy = asyncio.Lock()
        self._history: tuple[WeightsUpdate, ...] = ()
        """Updates since the last complete one, in order."""
        self._following: asyncio.Task[None] | None = None
        self._joined: dict[str, int] = {}
        """Engine processes in the group of a trainer: name -> incarnation."""
        self._token = ""
        """Random part of the names of received files. Each update has another token."""
        self.packing: dict[str, Any] = {}
        """Fields of the set-up about packing."""
        self._shared = SharedFiles()
        self._siblings: Siblings | None = None
        self._stamp = 0
        """Number of changes that this API server knows."""
        self._carries = True
        """False while another API server carries out the updates."""
        self.freed = False
        """True while engine processes may lack the weights."""
        self._former: tuple[WeightsUpdate, ...] = ()
        """Updates that restore the weights from before the sleep, a complete update first; () unless
        ``freed``."""

    @property
    def number(self) -> int:
        """Version for new requests. Engine processes that outlived another API server may begin above 0."""
        return self._links.weights

    @property
    def shown(self) -> bool:
        """True if answers name the version of the weights."""
        return self.number > 0 or self._labels[0] != DEFAULT

    @property
    def label(self) -> str:
        """Label of the version for new requests."""
        return self.label_of(self.number)

    def label_of(self, number: int) -> str:
        """Return the label of a version; its number for a version that is no longer remembered."""
        return self._labels.get(number, str(number))

    async def rename(self, label: str) -> None:
        """Change the label of the version for new requests."""
        await self._tell()  # a server that has just started may lack the newest state
        self._labels[self.number] = label
        self._stamp += 1
        await self._tell()

    # ---- several API servers, and several loads of a model

    @property
    def state(self) -> UpdatesState:
        """Return what other API servers, or a later load of the model, must know."""
        return UpdatesState(
            stamp=self._stamp, number=self.number, labels=dict(self._labels), history=self._history
        )

    async def share(self, siblings: Siblings) -> None:
        """Exchange the state with the other API servers, now and after each change."""
        self._siblings, self._carries = siblings, False
        siblings.weights[self._config.served_names[0]] = self._on_sibling
        await self._tell()

    async def bring_back(self, state: UpdatesState) -> None:
        """Take the state of an earlier load, and send the state to the other API servers: a new API server
        may be the carrier by now."""
        self.take(state)
        await self._tell()

    def take(self, state: UpdatesState) -> None:
        """Take a later state. An engine process with an earlier version gets the updates, and gets requests
        only after the updates."""
        if state.stamp <= self._stamp:
            return
        self._stamp, self._labels, self._history = state.stamp, dict(state.labels), state.history
        self._hold_files()
        if state.number > self.number:
            self._links.use_version(state.number)
        self._begin_following()

    async def _tell(self) -> None:
        """Send the state to the other API servers, and take later states."""
        if self._siblings is None:
            return
        line = msgspec.json.encode(self.state).decode()
        for answer in await self._siblings.tell_weights(self._config.served_names[0], line):
            self.take(msgspec.json.decode(answer, type=UpdatesState))

    def _on_sibling(self, line: str) -> bytes:
        """Take the state of another API server, and return the state here. Raises ValueError."""
        self.take(msgspec.json.decode(line, type=UpdatesState))
        return msgspec.json.encode(self.state)

    def _begin_following(self) -> None:
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    def start(self) -> None:
        """Begin an update. Replaces an update that was not finished."""
        self._files, self._partial, self._token = [], False, new_token()
        self._keep_files()  # the update that is replaced may have received files

    def add(self, files: tuple[str, ...], partial: bool) -> None:
        """Add a source to the update. Raises InvalidRequest without ``start``."""
        if self._files is None:
            raise InvalidRequest("no update has begun: send POST /start_weight_update first")
        known = set(self._files)
        self._files += [one for one in files if one not in known]
        if len(self._files) > MOST_FILES:
            self._files = None
            raise InvalidRequest(
                f"an update may have at most {MOST_FILES} files: begin again with fewer, larger files"
            )
        self._partial = self._partial or partial

    @property
    def ranks(self) -> int:
        """Number of ranks of all engine processes. Groups may differ."""
        found = sum(one.welcome.ranks for one in self._engines() if one.welcome is not None)
        return found or self._config.parallel.tensor_parallel_size

    async def join(self, group: TrainerGroup, first_rank: int) -> None:
        """Let every rank join ``group``, from rank ``first_rank`` on. Returns when the group is formed.

        Raises InvalidRequest for an engine of another release, and Unavailable if the trainer does not join.
        """
        async with self._busy:
            able = self._engines()
            if not able:
                raise Unavailable("no engine process runs; try again later")
            for one in able:
                if one.welcome is None or (common_version(one.welcome.versions) or 0) < RECEIVE_SINCE:
                    raise InvalidRequest(
                        f"the engine {one.name} runs an earlier release, which receives no broadcasts; "
                        "restart the engine with the release of this server"
                    )
            self._joined, token = {}, new_token()
            messages = list[JoinTrainer]()
            for one in able:
                messages.append(JoinTrainer(token=token, group=group, first_rank=first_rank))
                first_rank += 0 if one.welcome is None else one.welcome.ranks
            await self._collect(able, messages, group.seconds + JOIN_S, token)
            self._joined = {one.name: one.incarnation for one in able}

    async def receive(self, tensors: AnnouncedTensors, partial: bool) -> None:
        """Receive ``tensors`` from the trainer as a source of the update. Returns when all ranks have all
        tensors.

        Raises InvalidRequest for tensors with other bytes than announced, and Unavailable for a trainer that
        has ended or is late. The trainer then forms a new group.
        """
        async with self._busy:
            able = self._engines()
            if not self._joined or {one.name: one.incarnation for one in able} != self._joined:
                raise InvalidRequest(
                    "engine processes have started since the trainer's group was formed: send POST "
                    "/init_weight_transfer_engine again"
                    if self._joined
                    else "no trainer's group is formed: send POST /init_weight_transfer_engine first"
                )
            file = str(SHARED / shared_name(len(self._files or ()), self._token))
            self.add((file,), partial)
            message = ReceiveWeights(file=file, tensors=tensors)
            try:
                await self._collect(able, [message] * len(able), STAGE_S, file)
            except BaseException:
                self._joined, self._files = {}, None
                self._keep_files()
                raise
            self._shared.hold((file,))

    async def _collect(
        self, able: list[Instance], messages: Sequence[ToWeights], seconds: float, digest: str
    ) -> None:
        """Send each engine its message, and wait for the answers with ``digest``. Errors: see ``_ask``."""
        try:
            await self._ask(able, messages, seconds, lambda answer: answer.digest == digest)
        except BaseException:  # the receivers of the other engines would wait for the trainer
            self._drop(able)
            raise

    async def finish(
        self,
        label: str | None,
        paused: Callable[[], bool],
        leave: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Stage the sources of the update on all engine processes, then use the weights.

        ``paused``: returns True while the server is paused. ``leave``: ends requests before the weights
        change. Raises InvalidRequest for sources that do not fit, and Unavailable for an engine process that
        does not answer; the old weights then stay.
        """
        async with self._busy:
            if not self._files:
                raise InvalidRequest("the update has no weights: send POST /update_weights first")
            if self.freed and self._partial:
                raise InvalidRequest(
                    "the weights are empty after a sleep of level 2: update all tensors first, or wake the "
                    "server up without an update"
                )
            self._check_able(paused())  # a refusal here keeps the update
            await self._tell()  # a server that has just started may lack the newest state
            update = WeightsUpdate(version=self.number + 1, files=tuple(self._files), partial=self._partial)
            self._files = None
            await self._change(update, str(update.version) if label is None else label, paused, leave=leave)

    async def _change(
        self,
        update: WeightsUpdate,
        label: str,
        paused: Callable[[], bool],
        last: bool = True,
        leave: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Let all engine processes with the newest weights use ``update``. Errors: see ``finish``. ``last``:
        the weights are complete afterwards."""
        able = [one for one in self._engines() if one.weights == self.number]
        await self._stage(able, update, paused)
        self._labels[update.version] = label
        for old in list(self._labels)[1:-MOST_LABELS]:
            del self._labels[old]
        self._history = (*self._history, update) if update.partial else (update,)
        if last:
            self.freed, self._former = False, ()
        self._hold_files()
        # From here on, new attempts wait for the first process that uses the new weights.
        self._links.use_version(update.version)
        self._stamp += 1
        self._begin_following()
        await self._tell()  # before an engine reports the version, so that all know the label
        if leave is not None:  # not before: requests that begin meanwhile would see both versions
            await leave()
        await self._use(able)

    def check_sleep(self, level: int) -> None:
        """Raise InvalidRequest if the engine processes can't sleep at ``level``."""
        check_sleep(self._config, level)
        for one in self._engines():
            if one.welcome is None or (common_version(one.welcome.versions) or 0) < SLEEP_SINCE:
                raise InvalidRequest(
                    f"the engine {one.name} runs an earlier release, which cannot sleep; restart the engine "
                    "with the release of this server"
                )

    async def free(self, level: int, asleep: Callable[[], bool]) -> None:
        """Free the KV caches, and at ``level`` 2 the weights, of all engine processes, which compute nothing.

        ``asleep``: returns True until the server wakes up. Raises Unavailable for a server that woke up
        meanwhile, and for an engine process that does not answer or still computes.
        """
        async with self._busy:
            if not asleep():
                raise Unavailable("the server woke up before its memory was free")
            if level > 1 and not self.freed:
                self._former = former_updates(self._config, self._history)
                self.freed = True
            able = self._engines()
            try:
                free = [FreeMemory(weights=level > 1)] * len(able)
                await self._ask(able, free, USE_S, _is_used)
            except BaseException:  # an engine that is still busy must not free the memory later
                self._drop(able)
                raise

    async def restore(self) -> None:
        """Load the weights from before the sleep, unless an update came during the sleep. Raises the errors
        of ``finish``."""
        async with self._busy:
            if not self.freed:
                return
            label = self.label
            former = self._former
            for one in former:
                update = msgspec.structs.replace(one, version=self.number + 1)
                # After an error the next call begins again with the complete update.
                await self._change(update, label, lambda: True, last=one is former[-1])

    def close(self) -> None:
        """Stop following engine processes, answer no other API server, and release files in shared memory."""
        name = self._config.served_names[0]
        if self._siblings is not None and self._siblings.weights.get(name) == self._on_sibling:
            # Another API server that connects to a later load must not get the updates of this load.
            del self._siblings.weights[name]
        self._shared.keep(())
        if self._following is not None:
            self._following.cancel()

    def _check_able(self, paused: bool) -> None:
        """Raise InvalidRequest if an engine takes no new weights, or only during a pause."""
        engines = self._engines()
        if any(one.welcome is None or one.welcome.weights < 0 for one in engines):
            raise InvalidRequest(
                "an engine process runs an earlier release, which takes no new weights; restart the engine "
                "with the release of this server"
            )
        together = self._config.parallel.enable_expert_parallel
        if not paused and (together or any(one.role != "unified" for one in engines)):
            raise InvalidRequest(
                "groups with roles and expert-parallel groups change weights during a pause only: send POST "
                "/pause?mode=keep first, and POST /resume afterwards"
            )

    def _engines(self) -> list[Instance]:
        return [one for one in self._links.instances if one.alive]

    async def _stage(self, able: list[Instance], update: WeightsUpdate, paused: Callable[[], bool]) -> None:
        """Let ``able`` read ``update``. Raises the error of the first process that refuses."""
        try:
            if not able:
                raise Unavailable("no engine process has the newest weights; try again later")
            stage = [StageWeights(update=update)] * len(able)
            answers = await self._ask(able, stage, STAGE_S, _is_staged)
            if len({one.digest for one in answers}) > 1:
                raise InvalidRequest(
                    "the engine processes read different weights: put the same files on all hosts",
                    param="update_info",
                )
            self._check_able(paused())  # the server may have resumed meanwhile
        except BaseException:  # a client that leaves cancels the handler
            self._drop(self._engines())
            raise

    def _drop(self, able: list[Instance]) -> None:
        """Send ``able`` the order to drop the weights that the last message staged."""
        self._keep_files()
        for instance in able:
            if instance.alive:
                self._links.tell(instance.name, DropWeights())

    def _keep_files(self) -> None:
        """Release files in shared memory that no engine process needs."""
        used = {file for one in (*self._history, *self._former) for file in one.files}
        self._shared.keep({*used, *(self._files or ())})

    def _hold_files(self) -> None:
        """Hold the files of the newest weights, and release others: after the end of all engine processes, a
        new process reads the files."""
        self._shared.hold(file for one in self._history for file in one.files)
        self._keep_files()

    async def _use(self, able: list[Instance]) -> None:
        """Let ``able`` use the staged weights. A process that fails follows later."""
        version = self.number
        try:
            await self._ask(able, [UseWeights(version=version)] * len(able), USE_S, _is_used)
        except WeftError as error:
            log.warning("an engine process follows later to new weights: %s", error.message)
            if not any(one.weights == version for one in self._engines()):
                log.warning("requests wait until an engine process uses the new weights")

    async def _ask(
        self,
        able: list[Instance],
        messages: Sequence[ToWeights],
        seconds: float,
        done: Callable[[WeightsChanged], bool],
    ) -> list[WeightsChanged]:
        """Send each of ``able`` its message, and return the answers that are ``done``. Raises the error of an
        answer, and Unavailable for a process that ends or does not answer."""
        incarnations = {one.name: one.incarnation for one in able}
        for instance, message in zip(able, messages, strict=True):
            instance.weights_answer = None
            if instance.alive:
                self._links.tell(instance.name, message)
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            answers = [one.weights_answer for one in able]
            for answer in answers:
                if answer is not None and answer.error is not None:
                    raise ReportedError(answer.error)
            found = [answer for answer in answers if answer is not None and done(answer)]
            if len(found) == len(able):
                return found
            if any(not one.alive or one.incarnation != incarnations[one.name] for one in able):
                raise Unavailable("an engine process ended while the weights changed; try again")
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable("an engine process did not take the new weights in time; try again")
            await asyncio.sleep(POLL_S)

    async def _follow(self) -> None:
        """Send the newest weights to processes that lack them, until cancelled."""
        refused: dict[tuple[str, int], int] = {}
        while True:
            await asyncio.sleep(FOLLOW_S)
            if not await self._leads():
                continue
            async with self._busy:
                for instance in self._engines():
                    key = (instance.name, instance.incarnation)
                    if instance.weights == self.number or refused.get(key) == self.number:
                        continue
                    try:
                        await self._catch_up(instance)
                        log.info("engine %s has loaded the weights %r", instance.name, self.label)
                    except WeftError as error:
                        if error.blame == "client":
                            refused[key] = self.number
                        log.error(
                            "engine %s could not load the weights %r, and receives no requests: %s",
                            *(instance.name, self.label, error.message),
                        )

    async def _leads(self) -> bool:
        """Return True if this API server is the carrier. A new carrier first asks the other API servers for
        their states, because the former carrier may have reached only some of them."""
        before, siblings = self._carries, self._siblings
        self._carries = siblings is None or siblings.carries
        if self._carries and not before:
            await self._tell()
        return self._carries

    async def _catch_up(self, instance: Instance) -> None:
        for update in self._history:
            if update.version > instance.weights:
                # A complete update needs no version before: the engine counts from its own.
                await self._ask([instance], [StageWeights(update=update)], STAGE_S, _is_staged)
                await self._ask([instance], [UseWeights(version=update.version)], USE_S, _is_used)


def _is_staged(answer: WeightsChanged) -> bool:
    return answer.staged > 0


def _is_used(answer: WeightsChanged) -> bool:
    return answer.staged == 0
