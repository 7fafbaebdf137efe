"""The Python example of the README runs unchanged."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.servers import ROOT
from tests.support.slowness import deadline


@pytest.mark.slow
def test_the_example_prints_answers() -> None:
    (example,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    ran = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=deadline(120), check=False
    )
    assert ran.returncode == 0, ran.stderr
    answers = re.findall(r"^#### (\d+)$", ran.stdout, re.MULTILINE)
    assert answers == ["19", "19", "24"], ran.stdout
