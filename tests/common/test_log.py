"""The process name in log lines."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys

from weft.common.log import head_name


def test_a_replica_of_several_is_named_and_a_worker_always_is() -> None:
    assert head_name(0, 1) == "head"
    assert head_name(0, 1, 1) == "rank 1"
    assert [head_name(number, 2) for number in range(2)] == ["head 0", "head 1"]
    assert head_name(1, 2, 3) == "head 1 rank 3"


def lines_of(settings: str) -> list[str]:
    """Return the lines of a process that logs with ``settings``."""
    code = """
import sys
from weft.common import log
log.configure(sys.argv[1], "head 1")
logger = log.get_logger("weft.there")
logger.info('a "b"')
print(log.settings())
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("it failed")
"""
    ran = subprocess.run([sys.executable, "-c", code, settings], capture_output=True, text=True, check=True)
    assert ran.stdout == f"{settings}\n", "the processes that it starts log alike"
    return ran.stderr.splitlines()


def test_lines_have_a_date() -> None:
    first, *_ = lines_of("info")
    assert re.fullmatch(r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d I head 1 weft\.there: a "b"', first)


def test_json_is_an_object_a_line() -> None:
    one, two = map(json.loads, lines_of("info:json"))
    assert list(one) == ["ts", "level", "process", "logger", "message"]
    assert (one["level"], one["process"], one["logger"], one["message"]) == (
        "info",
        "head 1",
        "weft.there",
        'a "b"',
    )
    assert datetime.datetime.fromisoformat(one["ts"]).utcoffset() == datetime.timedelta(0)
    assert "ZeroDivisionError" in two["exception"]
