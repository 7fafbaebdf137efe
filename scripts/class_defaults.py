"""Write ``weft/config/families/declared/class_defaults.json`` from the installed transformers.

Run after a new row, or with a new transformers: ``python scripts/class_defaults.py``.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import transformers

from weft.config.families.declared.class_defaults import FILE
from weft.config.families.declared.rows import ROWS, TEXT_ROWS


def described(name: str) -> dict[str, Any]:
    """Return the defaults of the configuration class ``name``."""
    kind = getattr(transformers, name)
    found = dataclasses.fields(kind)
    names = dict(kind.attribute_map)
    fields = {names.get(f.name, f.name): f.default for f in found if f.default is not dataclasses.MISSING}
    theta = getattr(kind, "default_theta", None)
    if isinstance(theta, dict):
        theta = {layers: float(base) for layers, base in theta.items()}
    return {
        "model_type": kind.model_type,
        "fields": fields,
        "renamed": names,
        "theta": float(theta) if isinstance(theta, int) else theta,
    }


def main() -> None:
    """Write the file."""
    classes = sorted({row.config for row in (*ROWS.values(), *TEXT_ROWS.values())})
    text = json.dumps({name: described(name) for name in classes}, indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
