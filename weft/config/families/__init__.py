"""Model specs of each model family, read from ``config.json``. No torch."""

from weft.config.families.load import FAMILIES, load_spec

__all__ = ["FAMILIES", "load_spec"]
