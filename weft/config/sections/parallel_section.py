"""Settings of the model's layout over ranks; one of the sections (see ``sections``)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weft.types.layout import Layout


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one subsystem."""


class ParallelSection(Section, frozen=True, kw_only=True):
    """Distribution of the model over ranks and hosts."""

    @property
    def layout(self) -> Layout:
        """Layout of the model over ranks, for layers and groups."""
        return Layout(
            tensor=self.tensor_parallel_size,
            data=self.data_parallel_size,
            expert=self.enable_expert_parallel,
        )

    @property
    def ranks_here(self) -> int:
        """Maximum number of ranks on one host."""
        return -(-self.layout.ranks // self.hosts)

    tensor_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Number of ranks (processes) that divide the matrices of each layer.",
            extra={"alias": "tp"},
        ),
    ] = 1
    data_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Number of replicas. Each replica has its own sequences and KV cache.",
            extra={"alias": "dp"},
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        Meta(description="Divide the experts among all ranks of all replicas.", extra={"alias": "ep"}),
    ] = False
    moe_dispatch: Annotated[
        Literal["auto", "reduce", "throughput", "low-latency", "gather"],
        Meta(
            description="Communication between tokens and experts on other ranks. reduce: every rank "
            "has all tokens, and outputs are summed. throughput: all-to-all of exact sizes. "
            "low-latency: all-to-all of fixed sizes. gather: all-gather and reduce-scatter. auto: the "
            "fastest by measured cost."
        ),
    ] = "auto"
    redundant_experts: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description="Number of additional expert copies per layer, for the experts with the highest "
            "load.",
        ),
    ] = 0
    eplb_interval: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000_000,
            description="Number of steps between two rebalances of experts over ranks by load. 0: never.",
        ),
    ] = 0
    overlap: Annotated[
        Literal["off", "prefill", "all", "auto"],
        Meta(
            description="Split steps into two micro-batches, so that one communicates while the other "
            "computes. prefill: in steps with prompts. all: in all steps. auto: where micro-batches were "
            "measured to be faster, on CPUs in steps with prompts, on GPUs in captured decode steps."
        ),
    ] = "auto"
    collectives: Annotated[
        Literal["auto", "nccl", "gloo"],
        Meta(
            description="Library for collectives. auto: on GPUs NCCL, and memory of the other GPUs "
            "for small tensors; on CPUs shared memory on one host, else gloo. nccl: NCCL alone. gloo: also "
            "for ranks that share a GPU, through host memory (slow)."
        ),
    ] = "auto"
    rank_timeout: Annotated[
        float, Meta(gt=0, le=3600, description="Seconds without a message until a rank counts as dead.")
    ] = 10.0
    hosts: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Number of hosts over which the ranks of a group lie, equally many on each. Every "
            "host runs `weft engine`.",
        ),
    ] = 1
    group_secret: Annotated[
        str | None, Meta(description="File with a secret that all hosts share. Required with several hosts.")
    ] = None
    advertise: Annotated[
        str | None,
        Meta(
            description="Address of this host for the processes of other hosts (`weft engine`). Default: "
            "only processes of this host reach the group."
        ),
    ] = None
    ray_labels: Annotated[
        str | None,
        Meta(
            description="Labels of the Ray nodes that may run the group (`weft up --on ray`): "
            "NAME=VALUE,.. as in `ray start --labels`. Default: any node."
        ),
    ] = None
