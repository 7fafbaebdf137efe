"""Scripts that train the bundled checkpoints; not part of the installed package."""
