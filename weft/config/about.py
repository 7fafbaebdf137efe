"""Descriptions of the bundled models: abilities, and a working example input.

Each description is in ``about.json`` beside the checkpoint. The web page, ``weft chat``, ``weft models`` and
the log line at ready use the same description.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from weft.config.hub import BUNDLED

EXAMPLE_IMAGE = BUNDLED / "spool-vision" / "line.png"
"""Image of a line of text, 1 bit per pixel, small enough for a command line."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Abilities of a model, with an example input."""

    does: str = ""
    """One or two sentences; "" for an unknown model."""
    question: str = "Tom has 12 apples and buys 7 more. How many apples does he have?"
    """Example message of a user."""
    examples: tuple[str, ...] = ()
    """Messages that the model answers correctly. Each one goes with ``image``, if there is one."""
    completion: str = "The capital of France is"
    """Example text to continue."""
    image: str = ""
    """Name of the image file for ``question`` and ``examples``, beside the checkpoint; "" for none."""


def about(model_path: str) -> About:
    """Return the description of the bundled model in folder ``model_path``.

    Other folders, and folders without about.json, get a general description.
    """
    folder = Path(model_path)
    if folder.parent != BUNDLED:
        return About()
    try:
        return msgspec.json.decode((folder / "about.json").read_bytes(), type=About)
    except FileNotFoundError:
        return About()
