"""Check of the expert-parallel settings against each other and against the model."""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.config.sections.all import ParallelSection
from weft.config.spec import ModelSpec


def check_experts(spec: ModelSpec, parallel: ParallelSection) -> ModelSpec:
    """Return ``spec`` unchanged if the settings of expert parallelism suit the model.

    Raise ConfigError with the flags at fault and values that would work.
    """
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
                    f"{flag} {value} requires --enable-expert-parallel: add --enable-expert-parallel, "
                    f"or remove {flag}",
                    param=flag,
                )
        return spec
    counted = spec.counted_experts
    experts = spec.moe or counted
    if experts is None or (counted is not None and counted.undivided):
        why = f"{spec.architecture} has no routed experts" if counted is None else counted.undivided
        raise ConfigError(
            f"--enable-expert-parallel: {why}; remove --enable-expert-parallel",
            param="--enable-expert-parallel",
        )
    replicas = parallel.data_parallel_size
    ranks = parallel.layout.ranks
    if parallel.moe_dispatch == "reduce" and replicas > 1:
        raise ConfigError(
            "--moe-dispatch reduce requires that all ranks compute the same tokens, and "
            f"--data-parallel-size {replicas} gives the ranks different tokens; use auto, throughput, "
            "low-latency or gather",
            param="--moe-dispatch",
        )
    # A rank has at most one copy of each expert.
    most = experts.experts * (ranks - 1)
    if parallel.redundant_experts > most:
        raise ConfigError(
            f"--redundant-experts {parallel.redundant_experts}: {ranks} ranks can hold at most {most} "
            f"additional copies of {experts.experts} experts",
            param="--redundant-experts",
        )
    return spec
