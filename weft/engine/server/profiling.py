"""Runs torch's profiler over a running engine for a limited time, to measure each operation.

A profile slows the steps down and takes memory for every operation, so a profile always has an end time.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from weft.common.log import get_logger

log = get_logger(__name__)


class Profiler:
    """Profiles the steps of one engine process. Used from the stepping thread."""

    def __init__(self, folder: str | None, name: str) -> None:
        """``folder``: output folder; None disables profiling. ``name``: name of the process, used in file
        names.
        """
        self._folder, self._name = folder, name
        self._profile: Any = None
        self._until = 0.0
        self.running = False
        """True during a profile: call ``look`` at each step."""

    def ask(self, seconds: float) -> None:
        """Start a profile of ``seconds``. If a profile runs, change the end instead; 0 ends the profile now.

        Without a folder, log a warning and do nothing.
        """
        if self._folder is None:
            log.warning("profile request ignored: --profile-dir is not set")
            return
        self._until = time.monotonic() + seconds
        if self._profile is None and seconds > 0:
            self._begin()
        self.look()

    def look(self) -> None:
        """End the profile if the time is over."""
        if self._profile is not None and time.monotonic() >= self._until:
            self.end()

    def end(self) -> None:
        """End the profile, if there is one, and write the trace file. Errors of the write are logged."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        self.running = False
        file = Path(str(self._folder)) / f"{self._name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        try:
            profile.__exit__(None, None, None)
            file.parent.mkdir(mode=0o700, exist_ok=True)
            # The export creates a file with the mode of the umask, so export into a private folder first.
            with tempfile.TemporaryDirectory(dir=file.parent) as private:
                part = Path(private) / file.name
                profile.export_chrome_trace(str(part))
                part.chmod(0o600)
                part.rename(file)  # atomic: a reader sees the complete file or none
        except (OSError, RuntimeError) as error:
            log.error("a profile could not be written: %s", error)
        else:
            log.info("a profile was written: %s", file.name)

    def _begin(self) -> None:
        """Start the profile of all threads, CPU and GPU. Logged."""
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # Another thread may compute the steps.
        config = _ExperimentalConfig(profile_all_threads=True)
        self._profile = profile(activities=activities, experimental_config=config)
        self._profile.__enter__()
        self.running = True
        log.info("profile started")
