"""Measured cost models by name. ``python -m bench.cost_model`` measures another machine."""

from __future__ import annotations

from pathlib import Path

from weft.common.errors import ConfigError
from weft.scheduler.policy.step_cost import NAMES, CostModel

#: Seconds in the order of NAMES; the last features may be missing.
_MEASURED: dict[str, tuple[str, tuple[float, ...]]] = {
    "spool-text-cpu": (
        "spool-text in float32, one thread of a 2-core CPU machine, November 2026",
        (
            3.69e-3,
            1.22e-4,
            2.36e-5,
            3.01e-5,
            3.66e-5,
            3.67e-5,
            4.78e-4,
            6.84e-8,
            1.61e-7,
            1.03e-4,
            5.47e-7,
        ),
    ),
}

PRESETS: dict[str, CostModel] = {
    name: CostModel.of(dict(zip(NAMES, seconds, strict=False)), about)
    for name, (about, seconds) in _MEASURED.items()
}


def load(name: str) -> CostModel:
    """Return a preset by name, or the model of a JSON file. Raise ConfigError with a list of the presets."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--cost-model {name}: {error.strerror}; give a file written by bench/cost_model.py, or one of "
            f"{', '.join(PRESETS)}",
            param="--cost-model",
        ) from error
    return CostModel.from_json(data, f"--cost-model {path.name}")
