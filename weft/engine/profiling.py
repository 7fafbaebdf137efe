"""torch's profiler over the running engine of a head, for a while: what each operation of its steps took.

A profile slows the steps down that it sees, and takes memory with every operation, so it ends by itself.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from weft.common.log import get_logger

log = get_logger(__name__)


class Profiler:
    """Profiles the steps of one head. Used from the thread that steps."""

    def __init__(self, folder: str | None, name: str) -> None:
        """``folder``: where profiles are written to; None: nothing is ever profiled. ``name``: of the
        process, for their files."""
        self._folder, self._name = folder, name
        self._profile: Any = None
        self._until = 0.0

    def ask(self, seconds: float) -> None:
        """Begins a profile that ends after ``seconds``, or, where one runs, has it end then; 0: now."""
        if self._folder is None:
            log.warning("a profile was asked for, and there is no folder for it (--profile-dir)")
            return
        self._until = time.monotonic() + seconds
        if self._profile is None and seconds > 0:
            self._begin()
        self.look()

    def look(self) -> None:
        """Ends a profile whose time is over. Cheap while there is none."""
        if self._profile is not None and time.monotonic() >= self._until:
            self.end()

    def end(self) -> None:
        """Ends the profile, if there is one, and writes it."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        file = Path(str(self._folder)) / f"{self._name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        try:
            profile.__exit__(None, None, None)
            file.parent.mkdir(mode=0o700, exist_ok=True)
            # The export makes the file anew, with the mode of the umask: in a folder that nobody else enters.
            with tempfile.TemporaryDirectory(dir=file.parent) as private:
                part = Path(private) / file.name
                profile.export_chrome_trace(str(part))
                part.chmod(0o600)
                part.rename(file)  # whoever sees it sees all of it
        except (OSError, RuntimeError) as error:
            log.error("a profile could not be written: %s", error)
        else:
            log.info("a profile was written: %s", file.name)

    def _begin(self) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # Steps may be computed by another thread than the one that asks.
        config = _ExperimentalConfig(profile_all_threads=True)
        self._profile = profile(activities=activities, experimental_config=config)
        self._profile.__enter__()
        log.info("a profile begins")
