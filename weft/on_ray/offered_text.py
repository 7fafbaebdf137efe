"""The text of a topology for groups on other hosts."""

from __future__ import annotations

from pathlib import Path

import yaml

from weft.config.file import load_yaml
from weft.config.models.several import of_one_model
from weft.config.sections.all import FrontSection

FOR_GROUPS = ("drain_timeout", "engine_timeout", "log_level", "log_format")
"""Settings of the server that a group uses."""


def text_for_groups(file: str, front: FrontSection, model: str = "") -> str:
    """Return the topology of ``file`` with the settings of ``front`` that a group uses, so flags of the
    command line hold for groups. ``model``: of a file of several models, only this model. Keys and all other
    settings of the server stay here. Raise ConfigError."""
    loaded = load_yaml(file, Path(file).name, "FILE")
    if model:
        loaded = of_one_model(loaded, model)
    loaded["front"] = {name.replace("_", "-"): getattr(front, name) for name in FOR_GROUPS}
    return str(yaml.safe_dump(loaded, sort_keys=False))
