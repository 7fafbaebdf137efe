"""Creates the runner of an encode group, from a resolved configuration."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.common.log import get_logger
from weft.config.gpus import engine_rank
from weft.config.resolved import EngineConfig, KVConfig
from weft.engine.build import ALONE_S, DTYPES, LoadedModel, device_of, load, trace_of
from weft.engine.disagg.rank_transfers import check_transfers, open_embeddings
from weft.engine.weights.open_weights import open_weights
from weft.models.tower import TowerAlone, load_tower
from weft.parallel.mesh import Mesh
from weft.runner.encode_runner import EncodeRunner
from weft.runner.graphs.graphs import CudaCapture
from weft.runner.graphs.towers import captured_tower
from weft.runner.step_trace import StepTrace

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTower:
    """A vision tower with weights on a rank, without an embedding pool."""

    config: EngineConfig
    model: TowerAlone
    rank: int
    trace: StepTrace | None

    @property
    def kv(self) -> KVConfig:
        """KV configuration, equal on every rank because no size depends on free memory."""
        return self.config.kv

    def runner(self, kv: KVConfig | None = None) -> EncodeRunner:
        """Allocate all memory for steps and return the runner. May be called once."""
        config = self.config
        device, kv = device_of(config), kv or self.kv
        capture = CudaCapture(device) if config.runner.decode_graphs and device.type == "cuda" else None
        runner = EncodeRunner(
            captured_tower(self.model.vision, kv.media, capture),
            kv,
            dtype=DTYPES[config.dtype],
            device=device,
            together=not config.runner.deterministic,
            varying=self.model.varying,
            transfers=open_embeddings(config, self.rank),
            trace=self.trace,
            step_timeout=ALONE_S,
        )
        runner.weights = open_weights(self.model, self.rank, functools.partial(_read_tower, config))
        return runner


def load_encoder(config: EngineConfig, *, progress: bool = True, mesh: Mesh | None = None) -> LoadedTower:
    """Load the vision tower.

    Every rank has the whole tower; with several ranks, log a warning. Raises the ConfigError of
    ``weft.engine.build.load``.
    """
    check_transfers(config)
    rank = engine_rank(config) if mesh is None else mesh.rank
    ranks = config.parallel.tensor_parallel_size
    if ranks > 1 and rank == engine_rank(config):
        log.warning(
            "each of %d ranks encodes every image; to divide the images between the ranks, replace "
            "--tensor-parallel-size by --data-parallel-size %d",
            ranks,
            ranks,
        )
    path = config.runner.trace
    model = _read_tower(config, progress=progress)
    trace = StepTrace(trace_of(path, rank, config.group)) if path else None
    return LoadedTower(config=config, model=model, rank=rank, trace=trace)


def _read_tower(
    config: EngineConfig,
    *,
    progress: bool = False,
    files: Sequence[Path] | None = None,
    changed: set[str] | None = None,
) -> TowerAlone:
    """Load the tower with the settings of ``config``. Raises the errors of ``load_tower``."""
    return load_tower(
        config.model_path,
        config.spec,
        DTYPES[config.dtype],
        device_of(config),
        config.model.load_format if files is None else "safetensors",
        config.model.seed or 0,
        progress,
        invariant=config.runner.deterministic,
        files=files,
        changed=changed,
    )


def load_rank(
    config: EngineConfig, *, progress: bool = True, mesh: Mesh | None = None
) -> LoadedModel | LoadedTower:
    """Load the rank's part of the group by role. Raises the ConfigError of ``weft.engine.build.load``."""
    if config.transfer.role == "encode":
        return load_encoder(config, progress=progress, mesh=mesh)
    return load(config, progress=progress, mesh=mesh)
