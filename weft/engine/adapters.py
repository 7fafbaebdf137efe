"""LoRA adapters of an engine: checks the files, then lets the scheduler accept sequences.

The engine reads and checks an adapter completely before any rank does. So a folder that is no adapter of the
model is an answer to the sender, and no rank fails. The adapters of ``--lora-modules`` are loaded with the
engine, also after each restart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from weft.common.errors import ConfigError, InvalidRequest, WeftError
from weft.common.log import get_logger
from weft.config.adapters import AdapterFile, parse_modules, read_adapter
from weft.config.sections.lora_section import LoraSection
from weft.runner.wakeup_descriptor import WakeupDescriptor
from weft.scheduler.adapters import AdapterBook
from weft.types.adapters import AdapterChanged, DropAdapter, LoadAdapter
from weft.types.messages import TokenEvent

log = get_logger(__name__)


class ModelAdapters(Protocol):
    """The adapters of a model on the local rank. See ``weft.models.adapters``."""

    def check(self, adapter: AdapterFile) -> None: ...

    def changes_experts(self, adapter: AdapterFile) -> bool: ...

    def prefetch(self, digest: str, folder: str, name: str = "") -> Future[AdapterFile]: ...


class EngineAdapters:
    """The adapters of one engine. Also an ``AwaitedSource``, for events after a loss of ranks."""

    def __init__(self, section: LoraSection, book: AdapterBook | None, model: ModelAdapters | None) -> None:
        """Load the adapters of ``--lora-modules``. ``book`` and ``model``: None for an engine without places.

        Raise ConfigError if an adapter cannot be loaded.
        """
        self._section = section
        self._book, self._model = book, model
        self.digests: dict[str, str] = {}
        """Name -> digest of the adapters of ``--lora-modules``."""
        self._events: list[TokenEvent] = []
        self._loading: dict[str, tuple[LoadAdapter, Future[AdapterFile]]] = {}
        """Adapters that a thread reads, by digest."""
        self._dropped: list[LoadAdapter] = []
        self._wakeup = WakeupDescriptor()
        for name, folder in parse_modules(section.lora_modules).items() if self._takes else ():
            try:
                self.digests[name] = self._load(name, folder)
            except WeftError as error:
                raise ConfigError(error.message, param="--lora-modules") from error

    @property
    def _takes(self) -> bool:
        return self._book is not None and self._model is not None

    def begin(self, message: LoadAdapter | DropAdapter) -> AdapterChanged | None:
        """Load or drop an adapter beside the steps. Return the answer, or None: then ``finished`` has the
        answer later.

        A thread of every rank reads the files, so other requests do not wait.
        """
        digest = message.digest
        if isinstance(message, DropAdapter):
            if (found := self._loading.pop(digest, None)) is not None and self._book is not None:
                self._book.forget(digest)
                self._dropped.append(found[0])
            return self.apply(message)
        if self._book is None or self._model is None or self._book.knows(digest):
            return self.apply(message)
        if digest not in self._loading:
            self._book.announce(digest, message.folder)
            future = self._model.prefetch(digest, message.folder, message.name)
            self._loading[digest] = message, future
            future.add_done_callback(lambda _: self._wakeup.ring())
        return None

    def finished(self) -> list[AdapterChanged]:
        """Return the answers to loads that have ended since the last call. Does not block."""
        made = [
            AdapterChanged(
                digest=one.digest, loaded=False, error=InvalidRequest("the adapter was dropped").info()
            )
            for one in self._dropped
        ]
        self._dropped.clear()
        for digest, (message, future) in list(self._loading.items()):
            if future.done():
                del self._loading[digest]
                made.append(self.apply(message, future))
                if self._book is not None and not made[-1].loaded:
                    self._book.forget(digest)
        return made

    def apply(
        self, message: LoadAdapter | DropAdapter, read: Future[AdapterFile] | None = None
    ) -> AdapterChanged:
        """Load or drop an adapter, and return the answer. ``read``: the files were read by a thread; None
        reads the files now. Raises nothing for an adapter that cannot be
        loaded.

        Ranks read the adapter with the next step. Drop of an unknown digest succeeds.
        """
        try:
            if isinstance(message, LoadAdapter):
                self._load(message.name, message.folder, message.digest, pinned=message.pinned, read=read)
            elif self._book is not None:
                self._book.drop(message.digest)
        except (WeftError, OSError) as error:
            known = error if isinstance(error, WeftError) else InvalidRequest("the adapter can't be read")
            log.warning("a LoRA adapter was not loaded: %s", known.message)
            loaded = self._book is not None and self._book.accepts(message.digest)
            return AdapterChanged(digest=message.digest, loaded=loaded, error=known.info())
        return AdapterChanged(digest=message.digest, loaded=isinstance(message, LoadAdapter))

    def _load(
        self,
        name: str,
        folder: str,
        digest: str = "",
        *,
        pinned: bool = False,
        read: Future[AdapterFile] | None = None,
    ) -> str:
        """Check the files of an adapter, load the adapter, and return the digest.

        ``digest``: the digest that the folder must have; "" for any. Raise ConfigError or InvalidRequest.
        """
        if self._book is None or self._model is None:
            raise InvalidRequest(
                "the engine has no places for LoRA adapters: set --max-loras", param="adapter"
            )
        # Every API server sends every adapter: the files are read for the first one only.
        if digest and self._book.knows(digest):
            self._book.load(digest, folder, pinned)
            return digest
        try:
            if read is not None:
                adapter = read.result()
            else:
                adapter = read_adapter(folder, name, self._section.max_lora_rank)
                self._model.check(adapter)
        except ConfigError as error:
            shown = "" if f"adapter {name!r}" in error.message else f"adapter {name!r}: "
            raise ConfigError(f"{shown}{error.message}", param=error.param) from error
        except (WeftError, OSError):
            raise
        except Exception as error:  # files of a stranger must not end the engine
            log.exception("LoRA adapter %r can't be read", name)
            raise InvalidRequest(f"the files of adapter {name!r} can't be read", param="adapter") from error
        if digest and adapter.digest != digest:
            raise InvalidRequest(
                f"the folder of adapter {name!r} has other content than announced; load the adapter again",
                param="digest",
            )
        self._book.load(adapter.digest, adapter.folder, pinned, self._model.changes_experts(adapter))
        log.info("LoRA adapter %r loaded: rank %d, %.1f MB", name, adapter.rank, adapter.nbytes / 1e6)
        return adapter.digest

    def lost(self, fail: Callable[[str], list[TokenEvent]]) -> None:
        """Drop the adapters whose files changed, before new ranks read them. Call after a loss of ranks.

        An adapter of a request that no rank has read for certain is dropped, too: the folder may be missing
        on the host of another rank, and every new group would be lost again.
        ``fail`` ends all sequences of a digest and returns the events; ``take`` returns the events later.
        """
        if self._book is None:
            return
        for digest, folder in self._book.folders():
            unread = self._book.fresh(digest) and digest not in self.digests.values()
            if unread or not _has(folder, digest):
                log.warning(
                    "the LoRA adapter in %s is dropped after a loss of ranks: %s. Load the adapter again",
                    folder,
                    "a rank may have failed to read the files" if unread else "the files changed",
                )
                self._events += fail(digest)
                self._book.drop(digest)

    def close(self) -> None:
        """Close the descriptor. Reads that run end by themselves."""
        self._wakeup.close()

    # ---- AwaitedSource

    @property
    def sockets(self) -> Sequence[Any]:
        """Return the descriptor that a thread rings after a read."""
        return (self._wakeup.descriptor,)

    def take(self, scheduler: object) -> list[TokenEvent]:
        """Return the events of sequences ended by ``lost``."""
        self._wakeup.clear()
        events, self._events = self._events, []
        return events

    def serve(self, scheduler: object) -> list[TokenEvent]:
        """Return no events: the scheduler requests nothing."""
        return []


def _has(folder: str, digest: str) -> bool:
    """Return True if ``folder`` has the content of ``digest``."""
    try:
        return read_adapter(folder).digest == digest
    except (ConfigError, OSError):
        return False
