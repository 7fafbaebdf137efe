"""Run ``weft serve`` with planted faults: ``python -m ... faulty_server FOLDER PLANS PITFALLS SETTINGS``.

Settings may include settings of the ``front``, a file of further ``faults``, and ``longest_wait``: the
maximum seconds before a repeatedly dying process is started again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from tests.faults.rig import chain, config_of, pitfalls
from weft.api.settings import read_settings
from weft.cli.processes.spares import open_spares
from weft.cli.serve.server import run
from weft.common import log
from weft.control.processes import table
from weft.types.faults import Fault


def main(folder: str, plans: str, never: str, settings: str) -> int:
    log.configure("info", "front")
    fields = json.loads(settings)
    front = read_settings("spool-text", {"port": 0, **fields.pop("front", {})}).front
    table.LONGEST_WAIT_S = fields.pop("longest_wait", table.LONGEST_WAIT_S)
    planted = chain(Path(folder), json.loads(plans), after=3) + pitfalls(Path(folder), json.loads(never))
    if "faults" in fields:  # of a file: there may be more than a command line holds
        more = Path(fields.pop("faults")).read_bytes()
        planted += msgspec.json.decode(more, type=tuple[Fault, ...])
    config = msgspec.structs.replace(config_of(**fields), faults=planted)
    with open_spares(front, torchless=False) as spares:
        return run((config,), front, spares)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
