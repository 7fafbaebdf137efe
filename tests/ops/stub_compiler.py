"""A compiler stub that records its calls, for tests of builds."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

# Fails on sources that request a failure, and counts its calls. "-o FILE" is last or before the libraries.
STUB = """#!/bin/sh
if [ "$1" = --version ]; then echo "stub {version}"; exit 0; fi
case "$1" in -print-file-name=*) exit 0;; esac
echo "$*" >> "{calls}"
previous=
for word in "$@"; do
  if [ "$previous" = -c ] && grep -q ^BEGIN "$word"; then
    set -- $(head -1 "$word")
    : > "$2"
    while [ ! -e "$4" ]; do sleep 0.02; done
  fi
  if [ "$previous" = -c ] && grep -q DOES_NOT_COMPILE "$word"; then echo "error: told to fail"; exit 1; fi
  if [ "$previous" = -o ]; then echo made > "$word"; fi
  previous=$word
done
"""


def use_stub(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    stub = folder / f"stub-{version}"
    stub.write_text(STUB.format(version=version, calls=folder / "calls"))
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(stub))


def count(calls: Path) -> int:
    return len(calls.read_text().splitlines()) if calls.exists() else 0
