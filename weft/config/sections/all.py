"""Every setting, by subsystem.

A field named ``max_num_seqs`` is the flag ``--max-num-seqs``, the keyword ``max_num_seqs`` of ``LLM`` and the
YAML key ``max-num-seqs``. Names are unique over all sections. A component gets its section, never the whole
``Config``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weft.config.foreign import spelled
from weft.config.sections.front_section import FrontSection
from weft.config.sections.media_section import MediaSection
from weft.config.sections.parallel_section import ParallelSection, Section

__all__ = [
    "CacheSection",
    "Config",
    "FrontSection",
    "GrammarSection",
    "MediaSection",
    "ModelSection",
    "ParallelSection",
    "RunnerSection",
    "SchedulerSection",
    "SpeculationSection",
    "TransferSection",
    "title",
]


class ModelSection(Section, frozen=True, kw_only=True):
    """Which model, and how it is loaded."""

    model: Annotated[str, Meta(description="Folder, hub name, or a bundled model's name (weft models).")] = (
        "spool-text"
    )
    tokenizer: Annotated[
        str | None, Meta(description="Folder or hub name of the tokenizer; the model's by default.")
    ] = None
    revision: Annotated[str | None, Meta(description="Hub revision (branch, tag or commit).")] = None
    dtype: Annotated[
        Literal["auto", "float64", "float32", "bfloat16", "float16"],
        Meta(
            description="Type of weights and cache; auto: the checkpoint's (bundled ones on a CPU: float32).",
            extra={"reader": spelled({"half": "float16", "float": "float32"})},
        ),
    ] = "auto"
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 30)] | Literal["auto"] | None,
        Meta(description="Longest prompt + output in tokens; by default the model's own; auto: what fits."),
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "pickle", "partial", "dummy"],
        Meta(
            description="auto takes safetensors; pickles are refused unless asked for; partial: safetensors, "
            "and random weights in layers of which there are none, to see what fits; dummy: random weights."
        ),
    ] = "auto"
    num_hidden_layers_override: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Keep only the first N layers (for tests and benchmarks)."),
    ] = None
    quantization: Annotated[
        Literal["none", "int8", "w8a8", "int4", "w4a8", "fp8"],
        Meta(
            description="Round the matrices of linear layers and keep them so. int8: one scale an output "
            "channel; int4: a scale and a zero point for 64 inputs; fp8 (E4M3): a scale for 128 inputs. "
            "w8a8, w4a8: int8 and int4, and on a CPU what is multiplied by them is rounded to 8 bits too, "
            "which is faster. With any of them the head, and a table that is the head as well, has 8 bits."
        ),
    ] = "none"
    language_model_only: Annotated[
        bool, Meta(description="Load no vision tower: the model reads text alone, images are refused.")
    ] = False
    trust_remote_code: Annotated[bool, Meta(description="Allow code that a checkpoint brings.")] = False
    served_model_name: Annotated[
        tuple[str, ...], Meta(description="Name(s) that requests may use; the first is reported back.")
    ] = ()
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None,
        Meta(description="Seeds of requests without one become a function of this and their number."),
    ] = None


class CacheSection(Section, frozen=True, kw_only=True):
    """The KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=1024, description="Positions in one block of KV cache.")] = 64
    kv_cache_memory: Annotated[
        str | None,
        Meta(
            description="Cache size, e.g. 512M or 4G. On a CPU a share of free memory by default.",
            extra={"size": True},
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(
            description="fp8: keys, values and latents in 8 bits, with a scale each; auto: the model's type.",
            extra={"reader": spelled({"fp8_e4m3": "fp8"})},
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="Share of a GPU's memory for weights, activations and cache.")
    ] = 0.9
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse the cache of equal prefixes.")] = True
    share_cache_across_keys: Annotated[
        bool,
        Meta(
            description="Share cached prefixes and images between API keys, too, so that usage and time "
            "tell a client which prompts others have sent: only where clients trust each other."
        ),
    ] = False
    session_retention: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="Seconds after a turn of a session (header x-session-id and the like) in which its "
            "blocks are evicted after all others; at most half of the cache is kept so.",
        ),
    ] = 120.0
    explain_cache: Annotated[
        Literal["off", "asked", "all"],
        Meta(
            description="Say in answers why a prompt was not found further in the prefix cache. asked: where "
            "a request has the header x-weft-explain-cache; all: always. Shows tokens of earlier prompts "
            "of the same cache_salt, so only where clients trust each other."
        ),
    ] = "off"


class SchedulerSection(Section, frozen=True, kw_only=True):
    """Admission and the composition of steps."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=65536, description="Sequences that run at once.")] = 64
    max_num_batched_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 20,
            description="Tokens in one step, prefill and decode together; 0: 2048 on a GPU, 512 on a CPU, "
            "and more where many sequences decode.",
        ),
    ] = 0
    max_queued_requests: Annotated[
        int, Meta(ge=1, le=1 << 24, description="Sequences that may wait; beyond it requests get 429.")
    ] = 1024
    long_prefill_token_threshold: Annotated[
        int,
        Meta(
            ge=0, le=1 << 20, description="Prompt tokens of one sequence in one step at most; 0 for no limit."
        ),
    ] = 0
    step_policy: Annotated[
        Literal["mixed", "exclusive"],
        Meta(description="mixed: prefill and decode in one step; exclusive: prefill-first, one kind a step."),
    ] = "mixed"
    steps_in_flight: Annotated[
        Literal[0, 1, 2],
        Meta(
            description="2: plan the next step before the last one's tokens are read; 0: 2 on a GPU, 1 else."
        ),
    ] = 0
    itl_target_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="Chunk prompts so that running requests wait this long for a token; 0: no target.",
        ),
    ] = 0.0


class SpeculationSection(Section, frozen=True, kw_only=True):
    """Drafts of tokens to come, verified in one step with the token before them.

    Drafts never change the output.
    """

    speculative_method: Annotated[
        Literal["none", "mtp", "ngram"],
        Meta(
            description="Who proposes drafts; mtp: the model's own module for it; ngram: what followed the "
            "same words earlier in prompt or output."
        ),
    ] = "none"
    num_speculative_tokens: Annotated[
        int, Meta(ge=1, le=8, description="Drafts of one sequence in one step at most.")
    ] = 3
    speculative_adaptive: Annotated[
        bool,
        Meta(description="Propose fewer drafts, or none, where they are not accepted often enough to pay."),
    ] = True
    ngram_min_length: Annotated[
        int, Meta(ge=1, le=16, description="ngram: least tokens that must match to propose what followed.")
    ] = 2
    ngram_max_length: Annotated[
        int, Meta(ge=1, le=16, description="ngram: tokens to match at most; longer matches go first.")
    ] = 4

    @property
    def drafts(self) -> int:
        """Maximum number of drafts per sequence and step; 0 without speculation."""
        return 0 if self.speculative_method == "none" else self.num_speculative_tokens


class RunnerSection(Section, frozen=True, kw_only=True):
    """Where and how a step is computed."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="auto takes a GPU where there is one.")
    ] = "auto"
    attention_backend: Annotated[
        str, Meta(description="Name of an attention backend; auto chooses by capability.")
    ] = "auto"
    deterministic: Annotated[
        bool,
        Meta(
            description="Bitwise equal results whatever is computed beside a request; refused where an "
            "operation has no such form. On a CPU with the C++ operations all models are so by default, "
            "but those with latent attention."
        ),
    ] = False
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "processed_logprobs"],
        Meta(
            description="What logprobs of output tokens are of: the model's own logits (raw), or what a "
            "token was drawn from: masks, bias, penalties, temperature, top-k, top-p and min-p applied "
            "(processed). Those of prompts are raw."
        ),
    ] = "raw_logprobs"
    decode_graphs: Annotated[
        bool,
        Meta(
            description="Replay decode steps where the model can: CUDA graphs on a GPU, captured calls of "
            "the C++ operations on a CPU."
        ),
    ] = True
    threads: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="CPU threads of each rank; 0 divides the cores that may be used among all ranks of "
            "all replicas on the host.",
        ),
    ] = 0
    trace: Annotated[
        str | None,
        Meta(
            description="Write one trace event a step to this file (Chrome trace JSON); groups of a server "
            "put their names, and rank N over 0 .rankN, before the extension."
        ),
    ] = None
    trace_requests: Annotated[
        str | None,
        Meta(
            description="Folder where a server's processes write what each request waited for, as "
            "OpenTelemetry spans (OTLP JSON lines); `weft trace` makes one Perfetto file of it."
        ),
    ] = None
    profile_dir: Annotated[
        str | None,
        Meta(
            description="Folder where heads write torch's profiles (Chrome trace JSON) when POST "
            "/admin/profile asks for one."
        ),
    ] = None


class TransferSection(Section, frozen=True, kw_only=True):
    """Prefill and decode in different groups, caches moved between them."""

    role: Annotated[
        Literal["unified", "prefill", "decode", "encode"],
        Meta(
            description="What a group does: everything; prefill, and hand its caches over; decode what "
            "others have prefilled; or encode images for others. `weft serve --prefill P --decode D "
            "--encode E` sets it, and topology files do."
        ),
    ] = "unified"
    encode: Annotated[
        int, Meta(ge=0, le=1024, description="Groups that encode images, for `weft serve`.")
    ] = 0
    take_embeddings: Annotated[
        bool,
        Meta(
            description="Take the embeddings of images from groups with the role encode. Set by topologies "
            "that have such groups; with --language-model-only no image is encoded here."
        ),
    ] = False
    shard_embeddings: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="on: each rank of a group receives its share of an embedding's rows, and the ranks "
            "exchange them; off: each receives all of them. auto: on where a group has several ranks."
        ),
    ] = "auto"
    prefill: Annotated[
        int, Meta(ge=0, le=1024, description="Groups that prefill, for `weft serve`; needs --decode.")
    ] = 0
    decode: Annotated[
        int, Meta(ge=0, le=1024, description="Groups that decode, for `weft serve`; needs --prefill.")
    ] = 0
    transfer: Annotated[
        Literal["auto", "shm", "tcp"],
        Meta(
            description="What moves caches between groups. shm: shared memory of one host; tcp: also between "
            "hosts; auto: shm where all groups are on one host."
        ),
    ] = "auto"
    transfer_mode: Annotated[
        Literal["push", "pull"],
        Meta(
            description="When a cache leaves a group that prefills. push: layer by layer, while its prompt "
            "is computed; pull: once it is, so that the group that decodes has no blocks for a prompt that "
            "is still computed, and second tokens are later."
        ),
    ] = "push"
    transfer_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=600,
            description="Seconds that one sequence's transfer may take, from when its prefill begins.",
        ),
    ] = 300.0
    role_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="Seconds without a group that prefills after which groups that decode prefill, too "
            "(see --prefill-fallback). Where they cannot, requests wait for --recovery-timeout, or for this "
            "time if no group of the missing role will be started again.",
        ),
    ] = 10.0
    prefill_fallback: Annotated[
        Literal["local", "none"],
        Meta(description="Without a group that prefills: local: groups that decode prefill, too; none: 503."),
    ] = "local"
    decode_watermark: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description="Share of a decoding group's blocks that incoming sequences leave to running ones.",
        ),
    ] = 0.05


class GrammarSection(Section, frozen=True, kw_only=True):
    """Structured output."""

    grammar_backend: Annotated[
        Literal["auto", "llguidance", "xgrammar"],
        Meta(
            description="What turns schemas, patterns and grammars into masks of tokens; auto: llguidance. "
            "xgrammar has to be installed (weft[xgrammar])."
        ),
    ] = "auto"
    grammar_compile_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=600,
            description="Seconds that a request waits for its grammar to compile; then it gets 400.",
        ),
    ] = 10.0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All sections. Only entry points of processes use the whole ``Config``."""

    model: ModelSection = ModelSection()
    cache: CacheSection = CacheSection()
    scheduler: SchedulerSection = SchedulerSection()
    speculation: SpeculationSection = SpeculationSection()
    grammar: GrammarSection = GrammarSection()
    runner: RunnerSection = RunnerSection()
    parallel: ParallelSection = ParallelSection()
    transfer: TransferSection = TransferSection()
    media: MediaSection = MediaSection()
    front: FrontSection = FrontSection()


def title(section: str) -> str:
    """Return the heading of a section for lists of flags: ``Cache (the KV cache)``.

    The text comes from the first sentence of the section's docstring.
    """
    about = (type(getattr(Config(), section)).__doc__ or "").partition(".")[0]
    name = "Server" if section == "front" else section.capitalize()
    return f"{name} ({about[:1].lower()}{about[1:]})"
