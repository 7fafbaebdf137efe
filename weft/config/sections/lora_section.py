"""Settings of LoRA adapters; one of the sections (see ``sections``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from weft.common.errors import ConfigError
from weft.config.sections.parallel_section import Section


class LoraSection(Section, frozen=True, kw_only=True):
    """LoRA adapters, served beside the model."""

    max_loras: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Places for LoRA adapters in the memory of the device: adapters that run at the same "
            "time. 0: no adapters, at no cost.",
        ),
    ] = 0
    max_lora_rank: Annotated[
        int, Meta(ge=1, le=1024, description="Largest rank of a LoRA adapter. Sets the size of a place.")
    ] = 16
    lora_experts: Annotated[
        bool,
        Meta(
            description="Also serve LoRA adapters of routed experts. Each place then has memory for "
            "--max-lora-rank ranks of every expert."
        ),
    ] = False
    lora_saved_modules: Annotated[
        bool,
        Meta(
            description="Also serve LoRA adapters with a whole embedding or output head (modules_to_save). "
            "Each place then has memory for both matrices."
        ),
    ] = False
    lora_modules: Annotated[
        tuple[str, ...],
        Meta(
            description="LoRA adapters to load at the start: NAME=FOLDER, or a JSON object with name and "
            "path. Requires --max-loras."
        ),
    ] = ()
    lora_dir: Annotated[
        str | None,
        Meta(
            description="Folder with one LoRA adapter per subfolder. The first request for the model NAME "
            "loads the subfolder NAME. Requires --max-loras."
        ),
    ] = None
    max_cpu_loras: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="Adapters of --lora-dir in host memory, in each rank. Another adapter replaces the "
            "adapter that was unused for the longest time.",
        ),
    ] = 64
    allow_lora_updates: Annotated[
        bool,
        Meta(
            description="Accept POST /v1/load_lora_adapter and /v1/unload_lora_adapter, which read folders "
            "of the server. With --admin-key, both need the admin key. Requires --max-loras."
        ),
    ] = False


def check_lora(lora: LoraSection) -> None:
    """Raise ConfigError for adapters without places."""
    if lora.lora_modules and not lora.max_loras:
        raise ConfigError("--lora-modules requires --max-loras", param="--lora-modules")
    if lora.lora_dir is not None and not lora.max_loras:
        raise ConfigError("--lora-dir requires --max-loras", param="--lora-dir")
    if lora.lora_dir is not None and not Path(lora.lora_dir).is_dir():
        raise ConfigError(f"--lora-dir {lora.lora_dir} is not a folder", param="--lora-dir")
    if lora.lora_experts and not lora.max_loras:
        raise ConfigError("--lora-experts requires --max-loras", param="--lora-experts")
    if lora.lora_saved_modules and not lora.max_loras:
        raise ConfigError("--lora-saved-modules requires --max-loras", param="--lora-saved-modules")
    if lora.allow_lora_updates and not lora.max_loras:
        raise ConfigError("--allow-lora-updates requires --max-loras", param="--allow-lora-updates")
