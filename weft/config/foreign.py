"""Settings in the spelling of vLLM and SGLang.

A foreign spelling of a Weft setting is accepted. A setting without a counterpart is refused with a hint at
the replacement in Weft. docs/from-vllm.md lists both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from weft.common.errors import ConfigError
from weft.common.spelling import misspelt

SHORT = {
    "-tp": "--tensor-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
}
"""Short flags of vLLM and the long flags of Weft."""
SAME = {
    "enable_log_requests": "log_requests",
    "disable_log_requests": "no_log_requests",
    "no_enable_log_requests": "no_log_requests",
    "enforce_eager": "no_decode_graphs",
    "uvicorn_log_level": "log_level",
}
"""Flags of vLLM with another name in Weft and the same meaning."""
_SPECULATION = {
    "model": "speculative_model",
    "method": "speculative_method",
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_min": "ngram_min_length",
    "prompt_lookup_max": "ngram_max_length",
}
"""Keys of vLLM's ``--speculative-config`` and the fields of Weft."""
_EVENTS = {
    "endpoint": "kv_events_endpoint",
    "replay_endpoint": "kv_events_replay_endpoint",
    "topic": "kv_events_topic",
    "buffer_steps": "kv_events_buffer",
}
"""Keys of vLLM's ``--kv-events-config`` and the fields of Weft."""
_EVENTS_ENDPOINT = "tcp://*:5557"
"""Address of vLLM's events by default."""

_PARSERS = "--tool-call-parser and --reasoning-parser name other formats"
_ALWAYS = "this is always on: leave the flag out"
_OWN_FORMAT = "Weft reads the checkpoint's config.json only: leave the flag out"
_LORA = "use --max-loras, the number of adapters that run at the same time"
_PIPELINE = "Weft has no pipeline parallelism: use --tensor-parallel-size, or --data-parallel-size with --ep"
_HOSTS = (
    "set `hosts` for the group in a topology file, and run `weft engine FILE --group NAME` on each host, all "
    "hosts except the first with --join (docs/parallel.md)"
)
_TIERS = (
    "use --kv-host, host memory beside a GPU, or --kv-disk. On a CPU the KV cache is in host memory already: "
    "enlarge --kv-cache-memory"
)
_COMPILE = "Weft compiles no model graphs; --decode-graphs replays decode steps"

INSTEAD: dict[str, str] = {
    # vLLM
    "pipeline_parallel_size": _PIPELINE,
    "pp": _PIPELINE,
    "enable_chunked_prefill": f"{_ALWAYS}; --max-num-batched-tokens sets the tokens of a step",
    "max_num_partial_prefills": "--long-prefill-token-threshold limits a prompt's part of a step",
    "enable_auto_tool_choice": f"{_ALWAYS}; {_PARSERS}",
    "enable_reasoning": f"{_ALWAYS}; {_PARSERS}",
    "swap_space": _TIERS,
    "cpu_offload_gb": "Weft keeps all weights on the device: use --quantization for smaller weights",
    "kv_offloading_size": _TIERS,
    "kv_transfer_config": "use --prefill P --decode D, or weft up (docs/topologies.md)",
    "kv_cache_memory_bytes": "use --kv-cache-memory",
    "num_gpu_blocks_override": "use --kv-cache-memory",
    "enable_lora": _LORA,
    "enable_prompt_embeds": "Weft takes prompts as text or as token ids",
    "rope_scaling": _OWN_FORMAT,
    "rope_theta": _OWN_FORMAT,
    "tokenizer_mode": "Weft reads the tokenizer's files only: leave the flag out",
    "guided_decoding_backend": "use --grammar-backend",
    "structured_outputs_config": "use --grammar-backend",
    "scheduling_policy": "requests may set the field priority: leave the flag out",
    "num_scheduler_steps": "use --steps-in-flight",
    "async_scheduling": "use --steps-in-flight 2",
    "max_seq_len_to_capture": _COMPILE,
    "compilation_config": _COMPILE,
    "cuda_graph_sizes": _COMPILE,
    "distributed_executor_backend": "Weft starts its own processes: leave the flag out",
    "worker_use_ray": "Weft starts its own processes: leave the flag out",
    "data_parallel_size_local": _HOSTS,
    "api_server_count": "use --fronts",
    "disable_log_stats": "use --log-level warning",
    "disable_uvicorn_access_log": "use --log-requests for an access log; the default is none",
    "prefix_caching_hash_algo": "Weft has only one hash algorithm: leave the flag out",
    "response_role": "responses always have the role assistant: leave the flag out",
    "chat_template_content_format": "Weft detects the format from the chat template: leave the flag out",
    "override_generation_config": "use --generation-config FOLDER with a file of your own, or set the fields "
    "in requests",
    "task": "all checkpoints serve embeddings: leave the flag out",
    "runner": "all checkpoints serve embeddings: leave the flag out",
    "override_pooler_config": "use --pooling",
    "mm_processor_kwargs": "the checkpoint's preprocessor_config.json has the settings of image processing",
    "allowed_local_media_path": "use data: URLs, or --allowed-media-domains",
    "disable_frontend_multiprocessing": "leave the flag out; --fronts sets the number of API servers",
    "download_dir": "set HF_HOME",
    "tokenizer_revision": "--revision also applies to the tokenizer",
    "master_addr": _HOSTS,
    "master_port": _HOSTS,
    "n": _HOSTS,
    "r": _HOSTS,
    "nnodes": _HOSTS,
    "node_rank": _HOSTS,
    "code_revision": "Weft runs no code of checkpoints",
    "enable_ssl_refresh": _ALWAYS,
    "ssl_ciphers": "OpenSSL's configuration of the host sets the ciphers: leave the flag out",
    "allow_credentials": "use --allowed-origins",
    "allowed_methods": "use --allowed-origins",
    "allowed_headers": "use --allowed-origins",
    "collect_detailed_traces": "spans always have the stages of a request: leave the flag out",
    "enable_expert_parallel_load_balancing": "use --eplb-interval",
    "enable_eplb": "use --eplb-interval",
    "disable_custom_all_reduce": "leave the flag out",
    "calculate_kv_scales": "--kv-cache-dtype fp8 has a scale for each entry: leave the flag out",
    "max_parallel_loading_workers": "leave the flag out",
    # SGLang
    "model_path": "use --model",
    "tokenizer_path": "use --tokenizer",
    "context_length": "use --max-model-len",
    "mem_fraction_static": "use --gpu-memory-utilization",
    "max_running_requests": "use --max-num-seqs",
    "max_total_tokens": "use --kv-cache-memory",
    "max_prefill_tokens": "use --max-num-batched-tokens",
    "chunked_prefill_size": "use --max-num-batched-tokens, or --long-prefill-token-threshold",
    "tp_size": "use --tensor-parallel-size",
    "dp_size": "use --data-parallel-size",
    "ep_size": "use --enable-expert-parallel",
    "page_size": "use --block-size",
    "disable_radix_cache": "use --no-enable-prefix-caching",
    "disable_cuda_graph": "use --no-decode-graphs",
    "schedule_policy": "client requests and API keys get fair shares: leave the flag out",
    "schedule_conservativeness": "leave the flag out",
    "random_seed": "use --seed",
    "speculative_algorithm": "use --speculative-method mtp or ngram",
    "speculative_num_draft_tokens": "use --num-speculative-tokens",
    "speculative_num_steps": "use --num-speculative-tokens",
    "speculative_draft_model_path": "use --speculative-method draft with --speculative-model",
    "enable_metrics": _ALWAYS,
    "enable_cache_report": _ALWAYS,
    "disaggregation_mode": "use --role in a topology (weft up), or --prefill P --decode D",
    "sampling_backend": "leave the flag out",
    "enable_deterministic_inference": "use --deterministic",
    "load_balance_method": "use --routing-policy",
    "dist_init_addr": _HOSTS,
    "tool_server": "clients run the tools, not the server",
    "is_embedding": "checkpoints without an output head serve embeddings only: leave the flag out",
    "log_level_http": "use --log-level",
    "json_model_override_args": _OWN_FORMAT,
    # Weft, earlier releases
    "rdzv": _HOSTS,
    "only_host": "run `weft engine FILE --group NAME` on the host of the group, and `weft front FILE`",
}
"""Foreign field name to the hint at the replacement in Weft."""


def dtype_name(value: Any) -> str:
    """Return the name of a dtype, which may have another spelling or be a dtype of torch."""
    name = str(value).removeprefix("torch.")
    return {"half": "float16", "float": "float32"}.get(name, name)


def spelled(same: Mapping[str, str]) -> Callable[[Any], Any]:
    """Return a value reader that maps each key of ``same`` to its value. Other values stay unchanged."""
    return lambda value: same.get(value, value) if isinstance(value, str) else value


def most_images(value: Any) -> Any:
    """Return the number of images in vLLM's ``--limit-mm-per-prompt``.

    Accepted forms: ``{"image": 4}``, ``{"image": {"count": 4}}`` and ``image=4``. Other values are returned
    unchanged. Raise ConfigError for invalid JSON, without an image limit, and for limits of other media above
    0.
    """
    flag = "--limit-mm-per-prompt"
    if isinstance(value, str) and "=" in value:
        value = dict(part.partition("=")[::2] for part in value.split(","))
    elif isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError(f"{flag} is not valid JSON", param=flag) from None
    if not isinstance(value, Mapping):
        return value
    # A limit of 0 for video or audio asks for nothing, so vLLM's usual form passes.
    others = {kind: count for kind, count in value.items() if kind != "image" and count not in (0, "0", None)}
    if others or "image" not in value:
        raise ConfigError(
            f'{flag} takes the number of images per prompt, {{"image": 4}} or 4: two frames of a video '
            "count as one image, and audio is not supported",
            param=flag,
        )
    count = value["image"]
    return count.get("count", count) if isinstance(count, Mapping) else count


def unknown(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about the unknown setting ``name``: a replacement, a similar name, or "".

    ``known``: names in the caller's spelling.
    """
    field = name.lstrip("-").replace("-", "_").lower()
    instead = INSTEAD.get(field) or INSTEAD.get(field.removeprefix("no_"))
    if instead:
        return f" Weft has no such setting: {instead}"
    # Very short names resemble too many others.
    near = misspelt(name, (one for one in known if len(one) > 2))
    return f" Did you mean {near}?" if near and len(name) > 2 else ""


def arguments(given: Sequence[str]) -> list[str]:
    """Return a command line in Weft's spelling. Raise ConfigError.

    Underscores in flags become dashes, vLLM's short flags become long flags, and each flag of ``_OBJECTS``
    becomes several flags.
    """
    found: list[str] = []
    rest = iter(given)
    for word in rest:
        # All words after "--" are positional, or flags of another command.
        if word == "--":
            return [*found, word, *rest]
        flag, equals, value = word.partition("=")
        flag = SHORT.get(flag, flag)
        if not flag.startswith("--"):
            # A short flag with a replacement, for example -pp.
            if flag.startswith("-") and flag[1:] in INSTEAD:
                raise ConfigError(f"there is no flag {flag}.{unknown(flag, ())}", param=flag)
            found.append(word)
            continue
        field = flag[2:].replace("-", "_")
        if field in _OBJECTS:
            text = value if equals else next(rest, "")
            for name, one in _OBJECTS[field](text).items():
                found += ["--" + name.replace("_", "-"), str(one)]
            continue
        flag = "--" + SAME.get(field, field).replace("_", "-")
        found.append(flag + equals + value)
    return found


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords, or keys of a file, in Weft's spelling, by the rules of ``arguments``.

    Raise ConfigError.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name in _OBJECTS and value is not None:
            found.update(_OBJECTS[name](value))
        elif (same := SAME.get(name)) is not None and same.startswith("no_"):
            found[same[3:]] = not value
        elif same is not None:
            found[same] = value
        else:
            found[key] = value
    return found


def speculation(value: Any) -> dict[str, Any]:
    """Return Weft's fields for vLLM's ``--speculative-config``: a JSON object or a mapping.

    Raise ConfigError.
    """
    flag = "--speculative-config"
    found = {}
    for key, one in _object(flag, value).items():
        if key not in _SPECULATION:
            raise ConfigError(
                f"{flag}: Weft supports {', '.join(_SPECULATION)}, not {str(key)[:80]!r} "
                "(--speculative-method mtp drafts with the model's own module, ngram from earlier text)",
                param=flag,
            )
        found[_SPECULATION[key]] = one
    if "speculative_method" in found and str(found["speculative_method"]).endswith("_mtp"):
        found["speculative_method"] = "mtp"  # older vLLM names contain the model: deepseek_mtp
    if "speculative_model" in found and found.get("speculative_method", "draft_model") == "draft_model":
        found["speculative_method"] = "draft"
    return found


def events(value: Any) -> dict[str, Any]:
    """Return Weft's fields for vLLM's ``--kv-events-config``: a JSON object or a mapping. Return {} for
    events that are switched off.

    Raise ConfigError.
    """
    flag = "--kv-events-config"
    given = dict(_object(flag, value))
    enabled = given.pop("enable_kv_cache_events", False)
    publisher = given.pop("publisher", None) or ("zmq" if enabled else "null")
    # Weft's own bounds replace both queue lengths: a slow router never holds the engine up.
    given.pop("hwm", None)
    given.pop("max_queue_size", None)
    if publisher not in ("zmq", "null"):
        raise ConfigError(f"{flag}: publisher must be zmq or null", param=flag)
    for key in (key for key in given if key not in _EVENTS):
        raise ConfigError(f"{flag}: Weft supports {', '.join(_EVENTS)}, not {str(key)[:80]!r}", param=flag)
    if not enabled or publisher == "null":
        return {}
    given.setdefault("endpoint", _EVENTS_ENDPOINT)
    return {_EVENTS[key]: one for key, one in given.items() if one not in (None, "")}


def as_json(value: Any) -> Any:
    """Return a mapping as JSON text; any other value unchanged."""
    return json.dumps(dict(value)) if isinstance(value, Mapping) else value


def _object(flag: str, value: Any) -> Mapping[str, Any]:
    """Return the JSON object of a flag. Raise ConfigError."""
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise ConfigError(f"{flag} is not valid JSON", param=flag) from None
    if not isinstance(given, Mapping):
        raise ConfigError(f"{flag} must be a JSON object", param=flag)
    return given


_OBJECTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "speculative_config": speculation,
    "kv_events_config": events,
}
"""Settings of vLLM with an object as value, and the functions that return the fields of Weft."""
