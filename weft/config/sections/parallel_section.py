"""Settings of the model's layout over ranks; one of the sections (see ``sections``)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weft.types.layout import Layout


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one subsystem."""


class ParallelSection(Section, frozen=True, kw_only=True):
    """How the model lies over ranks."""

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
        if self.only_host is not None:
            return self.layout.ranks
        return -(-self.layout.ranks // self.nnodes)

    tensor_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Ranks that share each layer's matrices (one process each).",
            extra={"alias": "tp"},
        ),
    ] = 1
    data_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Replicas, each with sequences and KV cache of its own.",
            extra={"alias": "dp"},
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        Meta(description="Divide whole experts over all ranks of all replicas.", extra={"alias": "ep"}),
    ] = False
    moe_dispatch: Annotated[
        Literal["auto", "reduce", "throughput", "low-latency", "gather"],
        Meta(
            description="How tokens reach experts of other ranks. reduce: every rank has all tokens, outputs "
            "are summed; throughput: all-to-all of exact sizes; low-latency: all-to-all of fixed sizes; "
            "gather: all-gather and reduce-scatter; auto: by measured cost."
        ),
    ] = "auto"
    redundant_experts: Annotated[
        int,
        Meta(ge=0, le=65536, description="Further copies of experts in each layer, for those in demand."),
    ] = 0
    eplb_interval: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000_000,
            description="Steps after which experts move to other ranks by what they had to do; 0: never.",
        ),
    ] = 0
    overlap: Annotated[
        Literal["off", "prefill", "all", "auto"],
        Meta(
            description="Split steps in two micro-batches, one's communication under the other's compute: in "
            "steps with prompts, in all, or where measured costs say that it pays."
        ),
    ] = "auto"
    collectives: Annotated[
        Literal["auto", "nccl", "gloo"],
        Meta(
            description="What ranks meet over. auto: NCCL on GPUs, else shared memory of one host, else "
            "gloo; gloo: also for ranks that share a GPU, by way of host memory (slow)."
        ),
    ] = "auto"
    rank_timeout: Annotated[
        float, Meta(gt=0, le=3600, description="Seconds after which a silent rank counts as dead.")
    ] = 10.0
    nnodes: Annotated[int, Meta(ge=1, le=1024, description="Hosts that the ranks are spread over.")] = 1
    node_rank: Annotated[int, Meta(ge=0, le=1023, description="Number of this host; 0 has the front.")] = 0
    only_host: Annotated[
        Annotated[int, Meta(ge=0, le=1023)] | None,
        Meta(description="Number of the host that has all ranks; by default they are spread over all hosts."),
    ] = None
    rdzv: Annotated[
        str | None, Meta(description="HOST:PORT of host 0, where ranks of several hosts meet.")
    ] = None
    group_secret: Annotated[
        str | None, Meta(description="File with a secret that all hosts share; needed with several hosts.")
    ] = None
