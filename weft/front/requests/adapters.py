"""LoRA adapters of one API server by name, and the messages that load the adapters on all engine processes.

    --lora-modules, POST /v1/load_lora_adapter ──► name -> content (digest)
                                                     │ LoadAdapter to every engine process, also to each that
                                                     ▼ joins or starts again later
    Instance.adapters: what each process has loaded; requests go only to processes that have the adapter

Requests carry the digest of an adapter's content, not the name. New content under an old name is another
adapter: running requests end with the old adapter. With several API servers, each API server sends its
changes to the others.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from weft.common.errors import (
    ConfigError,
    InvalidRequest,
    NotFound,
    Unavailable,
    WeftError,
)
from weft.common.log import get_logger
from weft.config.adapters import CONFIG, AdapterFile, parse_modules, read_adapter
from weft.config.resolved import EngineConfig
from weft.control.links.links import Links
from weft.front.monitoring.adapter_metrics import AdapterMetrics
from weft.front.monitoring.metrics import Metrics
from weft.front.protocol.parse import printable, unknown_model
from weft.front.requests.adapter_spread import POLL_S, Spread, wanted_of
from weft.front.requests.reading import Job
from weft.front.siblings import Siblings
from weft.text.choice import Choice
from weft.types.adapters import LoadAdapter

log = get_logger(__name__)

T = TypeVar("T")

LIST_S = 1.0
"""Seconds between two listings of --lora-dir."""
REFUSED_S = 10.0
"""Seconds until a refused subfolder of --lora-dir is read again."""
MOST_NAME = 128
"""Maximum characters of a name."""
MOST_ADAPTERS = 4096
"""Maximum adapters of a server."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter by name."""

    name: str
    digest: str
    folder: str
    pinned: bool = False
    listed: bool = False
    """True for an adapter of --lora-dir."""
    rank: int = 0
    created: int = 0
    """Seconds since 1970 of the load."""

    @property
    def message(self) -> LoadAdapter:
        return LoadAdapter(name=self.name, digest=self.digest, folder=self.folder, pinned=self.pinned)


class AdapterAbsent(Unavailable):
    """A request names an adapter of --lora-dir that is not loaded yet."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the adapter {name!r} is not loaded yet; try again later")
        self.name = name


class OpenRequest(Protocol):
    """An open request (``weft.front.requests.generation.Generation``)."""

    job: Job
    choices: list[Choice]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of one name, as sent between API servers."""

    name: str
    adapter: Adapter | None = None
    """The new adapter; None after an unload."""


_changes = msgspec.json.Decoder(Change)
_lists = msgspec.json.Decoder(list[Adapter])


class Adapters:
    """The adapters of one API server. Used from the event loop, except ``names`` and ``digest_of``."""

    def __init__(self, config: EngineConfig, links: Links) -> None:
        """``config``: settings, with ``--lora-modules``. ``links``: to the engine processes."""
        self._section = config.lora
        self._models = (*config.served_names, *config.accepted_names)
        self._links = links
        self._spread = Spread(links)
        self._by_name: dict[str, Adapter] = {}
        self._loading: Adapter | None = None
        """The adapter that a request loads now. Requests find the adapter after all processes have loaded
        the adapter."""
        self._wanted: dict[str, LoadAdapter] | None = None
        """The contents for all engine processes; None after a change."""
        self._used: dict[str, float] = {}
        """Time of the last request, by name of an adapter."""
        self._refused: dict[str, tuple[float, WeftError]] = {}
        """Subfolder of --lora-dir -> (time, error) of the last failed load."""
        self._known = False
        """True when the adapters of the start are known."""
        self._subfolders: tuple[str, ...] = ()
        """Names of the adapters in --lora-dir, as listed last."""
        self._last_names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        """Cache of ``names``: (names of the adapters, value of ``names``)."""
        self._siblings: Siblings | None = None
        self._changing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(
        self, metrics: Metrics, running: Mapping[str, OpenRequest], siblings: Siblings | None = None
    ) -> None:
        """Read the adapters of ``--lora-modules``, get the adapters of the other API servers, and wait until
        the engine processes have answered. Raises ConfigError if a folder is no adapter.

        ``running``: the open requests, counted by adapter in ``metrics``.
        """
        if not self._section.max_loras:
            return

        def requests() -> list[tuple[str, bool]]:
            """Return (adapter, True after the first token) of each open request with an adapter."""
            found = [(self.find(one.job.asked.model), one) for one in running.values()]
            return [(a.name, any(c.token_ids for c in one.choices)) for a, one in found if a is not None]

        metrics.registry.register(AdapterMetrics(metrics.model, lambda: list(self._by_name), requests))
        if siblings is not None:
            self._siblings = siblings
            siblings.adapters[self._models[0]] = self._on_sibling
        # The other API servers know all later changes, so their answer counts instead of --lora-modules.
        lists = await siblings.ask_adapters(self._models[0]) if siblings is not None else []
        for known in lists:
            for one in _lists.decode(known):
                self._by_name.setdefault(one.name, one)
        for name, folder in parse_modules(self._section.lora_modules).items() if not lists else ():
            self._check_name(name)
            self._by_name.setdefault(name, await self._read(name, folder, pinned=False))
        self._known, self._wanted = True, None
        self._subfolders = await asyncio.to_thread(self._list)
        self._task = asyncio.create_task(self._keep())
        for one in self.listed():
            if (error := await self._spread.answered(one.digest)) is not None:
                log.warning("LoRA adapter %r: %s", one.name, error.message)

    def close(self) -> None:
        """End the background task, and stop answering other API servers. Idempotent."""
        if self._task is not None:
            self._task.cancel()
        if self._siblings is not None:
            self._siblings.adapters.pop(self._models[0], None)

    # -- names --------------------------------------------------------------------------------------

    def listed(self) -> list[Adapter]:
        """Return all adapters, in order of their load."""
        return list(self._by_name.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Names for the field ``model``: each adapter's name, alone and behind the name of the model."""
        alone = tuple(dict.fromkeys((*self._by_name, *self._subfolders)))
        before, names = self._last_names
        if alone != before:  # cached, because every request reads the names
            names = (*alone, *(f"{model}:{name}" for model in self._models for name in alone))
            self._last_names = (alone, names)
        return names

    def find(self, model: str) -> Adapter | None:
        """Return the adapter of the field ``model``; None for the model alone, or an unknown name."""
        if model in self._models:
            return None
        return self._by_name.get(self._without_base(model))

    def _without_base(self, model: str) -> str:
        """Return ``model`` without the name of the model in front of an adapter's name."""
        for base in self._models:
            if model not in self._by_name and model.startswith(f"{base}:"):
                return model.removeprefix(f"{base}:")
        return model

    def unloaded(self, model: str) -> bool:
        """Return True for an adapter of --lora-dir that is not loaded."""
        return self.find(model) is None and self._without_base(model) in self._subfolders

    def digest_of(self, model: str) -> str:
        """Return the digest for a request; "" for the model alone. Raises NotFound for an unknown name, and
        Unavailable while no engine process has the adapter: AdapterAbsent if ``resolved`` loads it."""
        if not model or model in self._models or not self._section.max_loras:
            return ""
        found = self.find(model)
        if found is None and self.unloaded(model):
            raise AdapterAbsent(self._without_base(model))
        if found is None:
            raise unknown_model(model)
        self._used[found.name] = time.monotonic()
        if not any(one.alive and one.has_adapter(found.digest) for one in self._links.instances):
            raise Unavailable(f"no engine has loaded the adapter {found.name!r} yet; try again later")
        return found.digest

    # -- changes ------------------------------------------------------------------------------------

    async def resolved(self, read: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``read``. If an adapter of --lora-dir is absent, load the adapter and read
        again. Raises WeftError."""
        try:
            return await read()
        except AdapterAbsent as absent:
            async with self._changing:
                if absent.name not in self._by_name:
                    await self._bring_listed(absent.name)
        return await read()

    async def load(self, name: str, folder: str, *, inplace: bool = False, pinned: bool = False) -> Adapter:
        """Load an adapter on every engine process, under ``name``, and return the adapter.

        ``inplace``: replace another adapter of the name. If one engine process refuses the adapter, all
        processes drop the adapter, and the name stays as before. Raises WeftError with the reason.
        """
        async with self._changing:
            before = self._by_name.get(name)
            self._check(name, before, inplace)
            return await self._bring(name, folder, before, pinned=pinned)

    async def _bring_listed(self, name: str) -> None:
        """Load a subfolder of --lora-dir. Beyond --max-cpu-loras, drop the adapters that were unused for the
        longest time. Raises WeftError. For ``REFUSED_S`` seconds after an error, raises the same error
        without reading the folder."""
        when, error = self._refused.get(name, (-math.inf, None))
        if error is not None and time.monotonic() < when + REFUSED_S:
            raise error.with_traceback(None)
        self._check(name, None, inplace=False)
        try:
            made = await self._bring(name, f"{self._section.lora_dir}/{name}", None, listed=True)
        except WeftError as error:
            self._refused[name] = (time.monotonic(), error)
            raise
        self._refused.pop(name, None)
        self._used[name] = time.monotonic()
        kept = [one for one in self.listed() if one.listed and one is not made]
        kept.sort(key=lambda one: self._used.get(one.name, 0.0))
        for one in kept[: max(len(kept) + 1 - self._section.max_cpu_loras, 0)]:
            await self._forget(one.name)
            log.info("LoRA adapter %r unloaded: unused for the longest time", one.name)

    async def _bring(
        self, name: str, folder: str, before: Adapter | None, *, pinned: bool = False, listed: bool = False
    ) -> Adapter:
        """Load a checked name on every engine process, and return the adapter. Requests find ``before``, the
        adapter of the name so far, until the load has succeeded. Raises WeftError."""
        made = await self._read(name, folder, pinned=pinned, listed=listed)
        self._loading = made
        try:
            self._spread.retry(made.digest)
            self._send_missing(changed=True)
            if (error := await self._spread.answered(made.digest)) is not None:
                raise error
            self._by_name[name] = made
        finally:
            # Also after the end of the request: the content is dropped unless a name has the content.
            self._loading = None
            self._send_missing(changed=True)
        await self._tell(Change(name=name, adapter=made))
        log.info("LoRA adapter %r loaded by a request: rank %d", name, made.rank)
        return made

    async def unload(self, name: str) -> None:
        """Accept no further request for an adapter. Running requests end as started. Raises NotFound."""
        async with self._changing:
            if name not in self._by_name:
                known = ", ".join(self._by_name) or "none"
                raise NotFound(
                    f"there is no LoRA adapter {printable(name, 64)}; loaded are: {printable(known, 400)}",
                    param="lora_name",
                )
            await self._forget(name)
            log.info("LoRA adapter %r unloaded by a request", name)

    def _check(self, name: str, before: Adapter | None, inplace: bool) -> None:
        """Raise InvalidRequest if an adapter of this name cannot be loaded now."""
        if not self._section.max_loras:
            raise InvalidRequest(
                "this server has no places for LoRA adapters; start the server with --max-loras",
                param="lora_name",
            )
        try:
            self._check_name(name)
        except ConfigError as error:
            raise InvalidRequest(error.message, param="lora_name") from None
        if before is not None and not inplace:
            raise InvalidRequest(
                f"the adapter {name!r} is loaded already; unload it first, or send load_inplace: true",
                param="lora_name",
            )
        if before is None and len(self._by_name) >= MOST_ADAPTERS:
            raise InvalidRequest(
                f"the server has {MOST_ADAPTERS} adapters already; unload one first", param="lora_name"
            )

    def _check_name(self, name: str) -> None:
        """Raise ConfigError for a name that is empty, too long, not printable, or a name of the model."""
        if not 0 < len(name) <= MOST_NAME or not name.isprintable():
            raise ConfigError(
                f"the name of a LoRA adapter must have 1 to {MOST_NAME} printable characters",
                param="--lora-modules",
            )
        if name in self._models or any(name.startswith(f"{model}:") for model in self._models):
            raise ConfigError(
                f"a LoRA adapter cannot have the name {name!r}, which stands for the model; choose another",
                param="--lora-modules",
            )

    async def _read(self, name: str, folder: str, *, pinned: bool, listed: bool = False) -> Adapter:
        """Read a folder and return the adapter. Raises ConfigError during the start, else InvalidRequest."""
        requested = self._task is not None
        try:
            file = await asyncio.to_thread(read_adapter, folder, name, self._section.max_lora_rank)
        except (ConfigError, OSError) as error:
            if not requested:
                raise
            why = error.message if isinstance(error, WeftError) else "the folder can't be read"
            raise InvalidRequest(why, param="lora_path") from None
        return _adapter(name, file, pinned, listed)

    async def _forget(self, name: str) -> None:
        """Free a name here and in the other API servers. A content without a name is dropped."""
        self._by_name.pop(name, None)
        self._used.pop(name, None)
        self._send_missing(changed=True)
        await self._tell(Change(name=name))

    # -- engine processes ---------------------------------------------------------------------------

    def missing(self, adapter: Adapter) -> int:
        """Return the number of live engine processes that have not loaded ``adapter``."""
        return self._spread.missing(adapter.digest)

    def _send_missing(self, *, changed: bool = False) -> None:
        """Send each adapter to each process that lacks the adapter. ``changed``: after a change of names."""
        if self._wanted is None or changed:
            loading = [] if self._loading is None else [self._loading]
            self._wanted = wanted_of(one.message for one in (*loading, *self._by_name.values()))
        self._spread.send_missing(self._wanted)

    async def _keep(self) -> None:
        """Send the adapters to every process that lacks one, and list --lora-dir, until cancelled."""
        listed = time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if time.monotonic() - listed > LIST_S:
                    listed = time.monotonic()
                    self._subfolders = await asyncio.to_thread(self._list)
                self._send_missing()
            except Exception:
                log.exception("LoRA adapters could not be sent to the engines; the next attempt follows")

    def _list(self) -> tuple[str, ...]:
        """Return the sorted names of the subfolders of --lora-dir with an adapter."""
        if self._section.lora_dir is None:
            return ()
        found = [path.parent.name for path in Path(self._section.lora_dir).glob(f"*/{CONFIG}")]
        return tuple(name for name in sorted(found) if name not in self._models)

    # -- other API servers --------------------------------------------------------------------------

    async def _tell(self, change: Change) -> None:
        """Send a change to the other API servers of the server."""
        if self._siblings is not None:
            await self._siblings.tell_adapter(self._models[0], msgspec.json.encode(change).decode())

    def _on_sibling(self, line: str) -> bytes:
        """Apply a change of another API server; an empty line asks for all adapters, as JSON."""
        if not line:
            return msgspec.json.encode(self.listed()) if self._known else b""
        change = _changes.decode(line)
        self._by_name.pop(change.name, None)
        if change.adapter is not None:
            self._by_name[change.name] = change.adapter
        self._send_missing(changed=True)
        if change.adapter is not None:
            self._used[change.name] = time.monotonic()
            self._spread.trust(change.adapter.digest)
        return b"found"


def _adapter(name: str, file: AdapterFile, pinned: bool, listed: bool) -> Adapter:
    return Adapter(
        name=name,
        digest=file.digest,
        folder=file.folder,
        pinned=pinned,
        listed=listed,
        rank=file.rank,
        created=int(time.time()),
    )
