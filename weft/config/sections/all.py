"""Every setting, by subsystem.

A field named ``max_num_seqs`` is the flag ``--max-num-seqs``, the keyword ``max_num_seqs`` of ``LLM`` and the
YAML key ``max-num-seqs``. Names are unique over all sections. A component gets its section, never the whole
``Config``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weft.config.foreign import as_json, dtype_name, spelled
from weft.config.sections.events_section import EventsSection
from weft.config.sections.front_section import FrontSection
from weft.config.sections.lora_section import LoraSection
from weft.config.sections.media_section import MediaSection
from weft.config.sections.parallel_section import ParallelSection, Section
from weft.config.sections.speculation_section import SpeculationSection
from weft.config.sections.tier_section import TierSection
from weft.types.sampling import MAX_TOP_LOGPROBS, MOST_TOP_LOGPROBS

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
    "TierSection",
    "TransferSection",
    "title",
]


class ModelSection(Section, frozen=True, kw_only=True):
    """The model, and how Weft loads the model."""

    model: Annotated[
        str, Meta(description="Folder, hub name (owner/name) or bundled model (see weft models).")
    ] = "spool-text"
    tokenizer: Annotated[
        str | None, Meta(description="Folder or hub name of the tokenizer. Default: the model's tokenizer.")
    ] = None
    revision: Annotated[str | None, Meta(description="Hub revision (branch, tag or commit).")] = None
    dtype: Annotated[
        Literal["auto", "float64", "float32", "bfloat16", "float16"],
        Meta(
            description="Dtype of weights and KV cache. auto: the checkpoint's dtype; float32 for "
            "bundled models on a CPU.",
            extra={"reader": dtype_name},
        ),
    ] = "auto"
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 30)] | Literal["auto"] | None,
        Meta(
            description="Maximum tokens of prompt and output together. Default: the model's limit. auto: "
            "as many as the memory allows."
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "pickle", "partial", "dummy"],
        Meta(
            description="Format of the weight files. auto: safetensors. pickle: *.bin, *.pt and *.pth "
            "files, which can run code when loaded. partial: safetensors, with random weights for "
            "layers without files, to test whether a model fits. dummy: random weights."
        ),
    ] = "auto"
    num_hidden_layers_override: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Keep only the first N layers (for tests and benchmarks)."),
    ] = None
    model_impl: Annotated[
        Literal["auto", "weft", "transformers"],
        Meta(
            description="Implementation of the model. weft: Weft's own. transformers: the modeling code of "
            "transformers with Weft's attention and KV cache; needs the extra weft[models]. auto: Weft's "
            "own if there is one, otherwise transformers."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "w8a8", "int4", "w4a8", "fp8", "w8a8-fp8"],
        Meta(
            description="Quantize the weights of linear layers while loading. int8: one scale per "
            "output channel. int4: one scale and zero point per 64 inputs. fp8 (E4M3): one scale per "
            "128 inputs. w8a8, w4a8: weights as int8 and int4; on a CPU also activations in 8 bits, "
            "which is faster. w8a8-fp8: on a GPU, weights and activations in FP8, one scale per row. Each "
            "choice keeps the output head in 8 bits, and the embedding table if both are tied."
        ),
    ] = "none"
    language_model_only: Annotated[
        bool, Meta(description="Load no vision tower. Requests with images are rejected.")
    ] = False
    hf_overrides: Annotated[
        str | None,
        Meta(
            description="JSON object with fields that replace fields of the checkpoint's config.json, for "
            "scores, classes and shorter embeddings (docs/http.md lists the fields).",
            extra={"reader": as_json},
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        Meta(
            description="Accept checkpoints that contain code. Only comparisons with --reference run the "
            "code."
        ),
    ] = False
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(description="Model name(s) that requests may use. Responses report the first name."),
    ] = ()
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None,
        Meta(
            description="Derive the seed of each request without a seed from this number and the request's "
            "number. Default: random seeds."
        ),
    ] = None


class CacheSection(Section, frozen=True, kw_only=True):
    """The KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=1024, description="Tokens per block of the KV cache.")] = 64
    kv_cache_memory: Annotated[
        str | None,
        Meta(
            description="Size of the KV cache, e.g. 512M or 4G. Default: the rest of "
            "--gpu-memory-utilization; on a CPU a share of free memory.",
            extra={"size": True},
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(
            description="Dtype of the KV cache. fp8: keys, values, latents and entries of sparse attention "
            "in 8 bits, with one scale per entry. auto: the model's dtype.",
            extra={"reader": spelled({"fp8_e4m3": "fp8"})},
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="Share of the GPU memory for weights, activations and KV cache.")
    ] = 0.9
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse KV cache blocks of equal prefixes.")] = (
        True
    )
    share_cache_across_keys: Annotated[
        bool,
        Meta(
            description="Share cached prefixes and images between API keys. Set this only if clients trust "
            "each other: usage and response times then show which prompts other clients have sent."
        ),
    ] = False
    session_retention: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="Seconds after each turn of a session (header x-session-id, for example) during "
            "which the session's blocks are evicted last. Applies to at most half of the KV cache.",
        ),
    ] = 120.0
    explain_cache: Annotated[
        Literal["off", "asked", "all"],
        Meta(
            description="Report in responses why the prefix cache did not cover more of the prompt. "
            "asked: for requests with the header x-weft-explain-cache. all: always. Set this only if "
            "clients trust each other: reports show tokens of earlier prompts with the same cache_salt."
        ),
    ] = "off"


class SchedulerSection(Section, frozen=True, kw_only=True):
    """Admission and the composition of steps."""

    max_num_seqs: Annotated[
        int, Meta(ge=1, le=65536, description="Maximum number of sequences that run at the same time.")
    ] = 64
    max_num_batched_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 20,
            description="Maximum tokens per step, prefill and decode together. 0: 2048 on a GPU and "
            "512 on a CPU, or more if --max-num-seqs requires more.",
        ),
    ] = 0
    max_queued_requests: Annotated[
        int,
        Meta(ge=1, le=1 << 24, description="Maximum number of waiting sequences. Further requests get 429."),
    ] = 1024
    long_prefill_token_threshold: Annotated[
        int,
        Meta(ge=0, le=1 << 20, description="Maximum prompt tokens of one sequence per step. 0: no limit."),
    ] = 0
    step_policy: Annotated[
        Literal["mixed", "exclusive"],
        Meta(
            description="mixed: prefill and decode in the same step. exclusive: each step has only prefill "
            "or only decode; prefill goes first."
        ),
    ] = "mixed"
    on_update: Annotated[
        Literal["keep", "recompute", "abort"],
        Meta(
            description="Requests that run when new weights arrive. keep: go on with the KV of the old "
            "weights. recompute: compute prompt and output again under the new weights. abort: end with "
            "finish_reason abort. Requests held by a pause always compute again."
        ),
    ] = "keep"
    steps_in_flight: Annotated[
        Literal[0, 1, 2],
        Meta(
            description="2: launch the next step before the tokens of the previous step are read. 0: 2 "
            "on a GPU, 1 on a CPU."
        ),
    ] = 0
    itl_target_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="Target in milliseconds for the time between two tokens of running requests. "
            "Prompt chunks are sized to meet the target. 0: no target.",
        ),
    ] = 0.0


class RunnerSection(Section, frozen=True, kw_only=True):
    """Device, attention and tracing of a step."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="Device that computes. auto: a GPU if the machine has one, else the CPU."),
    ] = "auto"
    attention_backend: Annotated[
        str,
        Meta(
            description="Name of the attention backend. auto: the best backend that supports the model and "
            "the device."
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        Meta(
            description="Batch-invariant results: the bits of a response do not depend on other "
            "requests. Rejected if an operation has no invariant form. On a CPU with the C++ "
            "operations this is the default for all models without latent attention."
        ),
    ] = False
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "processed_logprobs"],
        Meta(
            description="Logits that logprobs of output tokens are computed from. raw: the model's "
            "logits. processed: after masks, bias, penalties, temperature, top-k, top-p and min-p. "
            "Prompt logprobs are always raw."
        ),
    ] = "raw_logprobs"
    max_logprobs: Annotated[
        int,
        Meta(
            ge=-1,
            le=MOST_TOP_LOGPROBS,
            description="Maximum logprobs and prompt_logprobs of a request. Values above 20 are answered in "
            "binary form only. -1: up to the whole vocabulary.",
        ),
    ] = MAX_TOP_LOGPROBS
    decode_graphs: Annotated[
        bool,
        Meta(
            description="Replay captured steps if the model supports this: CUDA graphs of decode steps, "
            "small steps with prompts, drafts and vision towers on a GPU, captured calls of the C++ "
            "operations on a CPU."
        ),
    ] = True
    threads: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="CPU threads per rank. 0: divide the available cores among all ranks of all "
            "replicas on the host.",
        ),
    ] = 0
    trace: Annotated[
        str | None,
        Meta(
            description="Write one trace event per step to this file (Chrome trace JSON). With several "
            "groups, file names get the group's name before the extension; files of ranks above 0 also "
            "get .rankN."
        ),
    ] = None
    trace_requests: Annotated[
        str | None,
        Meta(
            description="Folder for request traces: OpenTelemetry spans (OTLP JSON lines) of every "
            "process. `weft trace` merges the folder into one Perfetto file."
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            description="URL of an OpenTelemetry collector (OTLP/HTTP), e.g. http://127.0.0.1:4318. Every "
            "process pushes the spans of request traces to the collector. Requires weft[otel]. Default: "
            "OTEL_EXPORTER_OTLP_ENDPOINT."
        ),
    ] = None
    profile_dir: Annotated[
        str | None,
        Meta(
            description="Folder for torch profiles of engines (Chrome trace JSON), requested with POST "
            "/admin/profile."
        ),
    ] = None


class TransferSection(Section, frozen=True, kw_only=True):
    """Prefill, decode and image encoding on different groups."""

    role: Annotated[
        Literal["unified", "prefill", "decode", "encode"],
        Meta(
            description="Role of a group. unified: prefill and decode. prefill: compute prompts and "
            "send the KV caches to decode groups. decode: receive KV caches and decode. encode: encode "
            "images for other groups. Set by topology files and by `weft serve --prefill P --decode D "
            "--encode E`."
        ),
    ] = "unified"
    encode: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Number of encode groups, which encode images for the other groups (`weft serve`).",
        ),
    ] = 0
    take_embeddings: Annotated[
        bool,
        Meta(
            description="Receive image embeddings from encode groups. The default in topologies with "
            "encode groups, for prefill and unified groups. With --language-model-only the group encodes no "
            "image itself."
        ),
    ] = False
    shard_embeddings: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="on: each rank receives a share of an embedding's rows, and the ranks of the "
            "group exchange the shares. off: each rank receives all rows. auto: on for groups with "
            "several ranks."
        ),
    ] = "auto"
    prefill: Annotated[
        int, Meta(ge=0, le=1024, description="Number of prefill groups (`weft serve`). Requires --decode.")
    ] = 0
    decode: Annotated[
        int, Meta(ge=0, le=1024, description="Number of decode groups (`weft serve`). Requires --prefill.")
    ] = 0
    transfer: Annotated[
        str,
        Meta(
            description="Transport for KV caches and embeddings between groups: auto, shm, tcp, nixl, an "
            "entry point of weft.transports, or a list of Weft's own transports in order of preference. "
            "shm: shared memory on one host. tcp: also between hosts. nixl: RDMA, requires weft[nixl]. "
            "auto: each pair of groups uses shm if the two groups share memory, else tcp."
        ),
    ] = "auto"
    transfer_mode: Annotated[
        Literal["push", "pull"],
        Meta(
            description="Time at which a prefill group sends a KV cache. push: layer by layer, during "
            "prefill. pull: after prefill. With pull the decode group reserves blocks later, and the "
            "second token comes later."
        ),
    ] = "push"
    transfer_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=600,
            description="Maximum seconds for the KV transfer of one sequence, from the start of prefill.",
        ),
    ] = 300.0
    role_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="Seconds without any prefill group until decode groups also compute prompts "
            "(see --prefill-fallback). Without the fallback, requests wait for --recovery-timeout, or "
            "for --role-timeout if no group of the missing role will be restarted.",
        ),
    ] = 10.0
    prefill_fallback: Annotated[
        Literal["local", "none"],
        Meta(
            description="Behaviour without any prefill group. local: decode groups also compute prompts. "
            "none: requests get 503."
        ),
    ] = "local"
    decode_watermark: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description="Share of a decode group's blocks that is reserved for running sequences. "
            "Incoming sequences use the rest.",
        ),
    ] = 0.05


class GrammarSection(Section, frozen=True, kw_only=True):
    """Structured output."""

    grammar_backend: Annotated[
        Literal["auto", "llguidance", "xgrammar"],
        Meta(
            description="Library that compiles schemas, patterns and grammars to token masks. auto: "
            "llguidance. xgrammar requires the package weft[xgrammar]."
        ),
    ] = "auto"
    grammar_compile_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=600,
            description="Maximum seconds to compile a grammar. A request with a slower grammar gets 400.",
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
    events: EventsSection = EventsSection()
    lora: LoraSection = LoraSection()
    tier: TierSection = TierSection()
    front: FrontSection = FrontSection()


def title(section: str) -> str:
    """Return the heading of a section for lists of flags: ``Cache (the KV cache)``.

    The text comes from the first sentence of the section's docstring.
    """
    about = (type(getattr(Config(), section)).__doc__ or "").partition(".")[0]
    name = "Server" if section == "front" else section.capitalize()
    return f"{name} ({about[:1].lower()}{about[1:]})"
