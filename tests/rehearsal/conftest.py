"""Checkpoints of rehearsals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.conftest import CASES
from tests.models.conftest import make_checkpoint as make_case
from tests.support.checkpoints import make_checkpoint
from tests.support.mtp_models import make_mtp_checkpoint


def make_wide(folder: Path) -> None:
    """Write a checkpoint with head sizes that FlashInfer accepts, and with windows."""
    import transformers

    config = transformers.Qwen2Config(  # type: ignore[call-arg]
        vocab_size=67,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        use_sliding_window=True,
        sliding_window=19,
        layer_types=["sliding_attention", "full_attention"],
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the name of a checkpoint to its folder. Each checkpoint is made once.

    Names are those of ``CASES`` and ``SHAPES``, "mtp" and "heads of 64".
    """
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            if name == "heads of 64":
                make_wide(folder)
            elif name == "mtp":
                folder = make_mtp_checkpoint(folder, skilled=True)
            elif name in CASES:
                make_case(name, folder)
            else:
                folder = make_checkpoint(folder, name)
            made[name] = folder
        return made[name]

    return get
