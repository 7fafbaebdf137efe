"""``weft serve`` with faults planted: ``python -m ... faulty_server FOLDER PLANS PITFALLS SETTINGS``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from tests.faults.rig import chain, config_of, pitfalls
from weft.api.settings import read_settings
from weft.common import log
from weft.launch.server import run


def main(folder: str, plans: str, never: str, settings: str) -> int:
    log.configure("info", "front")
    front = read_settings("spool-text", {"port": 0}).front
    planted = chain(Path(folder), json.loads(plans), after=3) + pitfalls(Path(folder), json.loads(never))
    return run((msgspec.structs.replace(config_of(**json.loads(settings)), faults=planted),), front)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
