"""Facts of each model family: how its config.json maps to a ModelSpec. One module a family, no torch."""
