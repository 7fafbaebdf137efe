"""Check of the expert-parallel settings against each other and against the model."""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.config.sections.all import ParallelSection
from weft.config.spec import ModelSpec


def check_experts(spec: ModelSpec, parallel: ParallelSection) -> ModelSpec:
    """Return ``spec``. Raise ConfigError with the flags at fault and values that would work."""
    if not parallel.enable_expert_parallel:
        # Without expert parallelism, settings of expert parallelism are refused instead of ignored.
        for flag, name, default in (
            ("--moe-dispatch", "moe_dispatch", "auto"),
            ("--redundant-experts", "redundant_experts", 0),
            ("--eplb-interval", "eplb_interval", 0),
        ):
            value = getattr(parallel, name)
            if value != default:
                raise ConfigError(
                    f"{flag} {value} is about experts that ranks divide: add --enable-expert-parallel, or "
                    f"leave it out",
                    param=flag,
                )
        return spec
    if spec.moe is None:
        raise ConfigError(
            f"--enable-expert-parallel: {spec.architecture} has no routed experts; leave it out",
            param="--enable-expert-parallel",
        )
    replicas = parallel.data_parallel_size
    ranks = parallel.layout.ranks
    if parallel.moe_dispatch == "reduce" and replicas > 1:
        raise ConfigError(
            f"--moe-dispatch reduce sums what all ranks make of the same tokens, and with "
            f"--data-parallel-size {replicas} they have others; use auto, throughput, low-latency or gather",
            param="--moe-dispatch",
        )
    # A rank has at most one copy of each expert.
    most = spec.moe.experts * (ranks - 1)
    if parallel.redundant_experts > most:
        raise ConfigError(
            f"--redundant-experts {parallel.redundant_experts}: {ranks} ranks have {most} further copies of "
            f"{spec.moe.experts} experts at most",
            param="--redundant-experts",
        )
    return spec
