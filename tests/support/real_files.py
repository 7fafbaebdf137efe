"""Find files of publishers, which are not part of the repository.

The environment variable WEFT_REAL_FILES names the folder of the files.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "WEFT_REAL_FILES"


def real_folders(part: str) -> list[Path]:
    """Return the folders in ``part`` of the real files, sorted.

    Skip the test if the variable is not set. Fail the test if the named folder lacks the files.
    """
    root = os.environ.get(VARIABLE)
    if not root:
        pytest.skip(f"{VARIABLE} is not set: it names a folder with published files")
    found = Path(root, part)
    folders = sorted(path for path in found.iterdir() if path.is_dir()) if found.is_dir() else []
    if not folders:
        pytest.fail(f"{VARIABLE} is {root}, and there are no folders in {found}")
    return folders
