"""A digest over all bytes of a model's weights.

Files on disk outlive an edit of the weights, so samples of the weights (``config.fingerprint``) are not
enough.

The digest of each file is remembered in the user's cache, under the file's path, size, inode and times. An
unchanged file is read only once. Adapters do not count: the hash of a prefix names the adapter.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from pathlib import Path

from weft.common.errors import ConfigError
from weft.common.folder import cache_folder
from weft.common.priority import step_back
from weft.config.resolved import EngineConfig
from weft.gguf.checkpoint_folder import gguf_files

_PIECE = 4 << 20
_REMEMBERED = re.compile(rb"[0-9a-f]{64}")
_ADAPTER = "adapter_model"
"""Beginning of the names of adapters' files, which may lie beside the model's files."""
_PICKLES = ("*.bin", "*.pt", "*.pth")


class WeightsDigest:
    """Digests the weights in a thread, beside the engine.

    Create the object before the weights are loaded: files that change between then and the digest are an
    error, because nobody knows which version was loaded.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Note the state of all files. Raises ConfigError if a file cannot be read."""
        self._random = _random(config)
        try:
            self._files = [(file, file_state(file)) for file in weight_files(config)]
        except OSError as error:
            raise _unreadable(error) from error
        folder = Path(config.model_path)
        own = [file for file, _ in self._files if file.parent == folder and file.suffix != ".json"]
        self._tensors = [] if self._random else own
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights digest", daemon=True)
        self.result: str | None = None
        """32 hex digits; None before the end, and after a failure."""
        self.error = ""
        """The reason of a failure; "" without one."""

    def start(self) -> None:
        """Begin. The thread has a low priority."""
        self._thread.start()
        step_back(self._thread)

    def wait(self, seconds: float | None = None) -> str | None:
        """Wait for the end, at most ``seconds``, and return ``result``."""
        self._thread.join(seconds)
        return self.result

    def stop(self) -> None:
        """End the thread soon, without a result."""
        self._stopping.set()

    def compute(self) -> str:
        """Return the digest, 32 hex digits. Raises ConfigError if a file changed or cannot be read."""
        made = hashlib.sha256(self._random.encode() + b"\0")
        for file, state in self._files:
            made.update(f"{file.name}\0{self._file(file, state)}\0".encode())
        return made.hexdigest()[:32]

    def tensor_files(self) -> list[str]:
        """Return the digests of the files with the model's own tensors; [] if a part of the weights is in no
        file. Raises ConfigError if a file changed or cannot be read."""
        return [self._file(file, state) for file, state in self._files if file in self._tensors]

    def _run(self) -> None:
        try:
            self.result = self.compute()
        except ConfigError as error:
            self.error = error.message

    def _file(self, file: Path, state: str) -> str:
        """Return the digest of a file: remembered, or over all bytes."""
        remembered = cache_folder("weights") / hashlib.sha256(state.encode()).hexdigest()[:32]
        with contextlib.suppress(OSError):
            found = remembered.read_bytes()
            if _REMEMBERED.fullmatch(found) and remembered.stat().st_uid == os.geteuid():
                if file_state(file) != state:
                    raise _changed(file)
                return found.decode()
        try:
            made = read_digest(file, self._stopping)
            if file_state(file) != state:
                raise _changed(file)
        except OSError as error:
            raise _unreadable(error) from error
        with contextlib.suppress(OSError):  # without a cache, the next start reads again
            remembered.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = remembered.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            temporary.write_text(made)
            temporary.rename(remembered)
        return made


def read_digest(file: Path, stopping: threading.Event | None = None) -> str:
    """Return the digest of all bytes of a file, 64 hex digits. Raises OSError, and ConfigError once
    ``stopping`` is set."""
    made, memory = hashlib.sha256(), bytearray(_PIECE)
    view = memoryview(memory)
    with file.open("rb", buffering=0) as opened:
        # hashlib releases Python's lock for long pieces, so the engine goes on.
        while count := opened.readinto(memory):
            if stopping is not None and stopping.is_set():
                raise ConfigError("the digest of the weights was stopped")
            made.update(view[:count])
    return made.hexdigest()


def weights_digest(config: EngineConfig) -> str:
    """Return the digest of the weights, 32 hex digits; blocks while files are read. Raises ConfigError."""
    return WeightsDigest(config).compute()


def weight_files(config: EngineConfig) -> list[Path]:
    """Return the files that hold the weights of the model and of a draft model, in a fixed order.

    ``config.json`` is one of them: a model that is run by code of transformers depends on all fields.
    """
    folders = [Path(config.model_path)]
    if config.speculation.speculative_model:
        folders.append(Path(config.speculation.speculative_model))
    found = list[Path]()
    for folder in folders:
        patterns = _PICKLES if config.model.load_format == "pickle" else ("*.safetensors",)
        files = [file for pattern in patterns for file in folder.glob(pattern)] + gguf_files(folder)
        if config.model.load_format == "dummy":  # the seed decides all weights, see ``_random``
            files = []
        found += [file for file in (folder / "config.json",) if file.is_file()]
        found += sorted((one for one in files if not one.name.startswith(_ADAPTER)), key=lambda one: one.name)
    return found


def _random(config: EngineConfig) -> str:
    """Return what decides random weights; "" if all weights come from files."""
    form = config.model.load_format
    return f"{form} {config.model.seed or 0}" if form in ("dummy", "partial") else ""


def file_state(file: Path) -> str:
    """Return a string that changes with the file. Links are followed. Raises OSError."""
    real = file.resolve()
    facts = real.stat()
    times = f"{facts.st_mtime_ns}\0{facts.st_ctime_ns}"
    return f"{real}\0{facts.st_size}\0{times}\0{facts.st_dev}\0{facts.st_ino}"


def _changed(file: Path) -> ConfigError:
    return ConfigError(f"{file.name} has changed since the start: restart the engine", param="--model")


def _unreadable(error: OSError) -> ConfigError:
    return ConfigError(f"the weights can't be read ({error.strerror})", param="--model")
