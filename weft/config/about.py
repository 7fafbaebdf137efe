"""Descriptions of the bundled models: abilities, and an input that works. Each stands beside its checkpoint,
in ``about.json``. The page, ``weft chat``, ``weft models`` and the line at ready show the same one.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from weft.config.hub import BUNDLED

EXAMPLE_IMAGE = BUNDLED / "spool-vision" / "line.png"
"""A drawn line of text, 1 bit a pixel, small enough for a command line."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Abilities of a model, and an example of what it answers."""

    does: str = ""
    """One or two sentences. "" where nothing is known of the model."""
    question: str = "Tom has 12 apples and buys 7 more. How many apples does he have?"
    """A message of a user."""
    completion: str = "The capital of France is"
    """A text that the model continues."""
    image: str = ""
    """Name of a file beside the checkpoint: the image that goes with ``question``."""


def about(model_path: str) -> About:
    """The description of the bundled model in the folder ``model_path``; a general one for other models."""
    folder = Path(model_path)
    if folder.parent != BUNDLED:
        return About()
    try:
        return msgspec.json.decode((folder / "about.json").read_bytes(), type=About)
    except FileNotFoundError:
        return About()
