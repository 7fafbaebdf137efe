"""Waits spin while spinning pays, and sleep at once on a machine where it does not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.slowness import deadline
from weft.ops.cpu import build

HEADER = Path(build.__file__).parent / "csrc" / "patience.h"
#: Reads how each awake wait ends, i(n time) or l(ate); prints for each wait a(wake) or s(leeping).
PROGRAM = """
#include "%s"
#include <cstdio>
#include <cstdlib>
int main(int, char** words) {
  weft::Patience patience{weft::Patience::Duration(std::atoi(words[1]))};
  for (const char* end = words[2]; *end; ++end) {
    const bool awake = patience.awake() > weft::Patience::Duration::zero();
    std::putchar(awake ? 'a' : 's');
    if (awake) patience.ended(*end == 'i');
  }
}
"""


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        compiler = build.find_compiler()
    except build.BuildError as error:
        pytest.skip(error.message)
    folder = tmp_path_factory.mktemp("patience")
    (folder / "waits.cpp").write_text(PROGRAM % HEADER)
    command = [compiler.path, "-std=c++17", "waits.cpp", "-o", "waits"]
    subprocess.run(command, cwd=folder, check=True, timeout=deadline(60))
    return folder / "waits"


@pytest.mark.parametrize(
    ("limit", "ends", "expected"),
    [
        ("50000", "i" * 40, "a" * 40),
        ("50000", "llli" * 10, "a" * 40),  # a late one now and then changes nothing
        ("50000", "l" * 40, "aaaa" + ("s" * 15 + "a") * 2 + "ssss"),
        # spinning pays again
        ("50000", "l" * 19 + "i" + "l" * 10, "aaaa" + "s" * 15 + "a" + "aaaa" + "ssssss"),
        ("0", "i" * 8, "s" * 8),
    ],
)
def test_when_a_wait_is_awake(waits: Path, limit: str, ends: str, expected: str) -> None:
    made = subprocess.run([waits, limit, ends], capture_output=True, text=True, timeout=deadline(20))
    assert made.stdout == expected
