"""Files as publishers ship them, which are not part of this repository.

The environment variable WEFT_REAL_FILES names the folder that has them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "WEFT_REAL_FILES"


def real_folders(part: str) -> list[Path]:
    """The folders in ``part`` of the real files, in order.

    Skips the test where the variable is not set, and fails where it names a folder without them.
    """
    root = os.environ.get(VARIABLE)
    if not root:
        pytest.skip(f"{VARIABLE} is not set: it names a folder with published files")
    found = Path(root, part)
    folders = sorted(path for path in found.iterdir() if path.is_dir()) if found.is_dir() else []
    if not folders:
        pytest.fail(f"{VARIABLE} is {root}, and there are no folders in {found}")
    return folders
