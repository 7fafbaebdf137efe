"""Settings of the HTTP server; see ``sections``."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from msgspec import Meta

from weft.common.errors import ConfigError
from weft.common.log import joined
from weft.config.foreign import spelled
from weft.config.sections.parallel_section import Section

_ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.\-]+(:\d{1,5})?/?|https?://\[[0-9A-Fa-f:.]+\](:\d{1,5})?/?")
_HOST = re.compile(r"\*|[A-Za-z0-9._\-]+|\[?[0-9A-Fa-f:.]+\]?")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


class FrontSection(Section, frozen=True, kw_only=True):
    """The HTTP server."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on. 0: a free port.")] = 8000
    ssl_certfile: Annotated[
        str | None,
        Meta(
            description="PEM file with the server's certificate and the intermediate certificates. With a "
            "certificate the server speaks only HTTPS. Changed files are used by new connections."
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        Meta(description="PEM file with the private key. Default: the key in the file of --ssl-certfile."),
    ] = None
    ssl_keyfile_password: Annotated[
        str | None,
        Meta(
            description="Password of an encrypted private key. All users of this machine can read command "
            "lines: prefer the --config file."
        ),
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        Meta(
            description="PEM file with the authorities that sign the certificates of clients, for "
            "--ssl-cert-reqs."
        ),
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        Meta(
            ge=0,
            le=2,
            description="Certificates of clients. 0: not requested. 1: checked if the client sends a "
            "certificate. 2: required, also for probes and metrics. With 1 or 2: TLS 1.3 without resumption.",
        ),
    ] = 0
    fronts: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Number of API server processes. All share one port and the same engines. If "
            "one process dies, only the connections of that process break.",
        ),
    ] = 1
    api_key: Annotated[
        tuple[str, ...],
        Meta(
            description="Key(s) that clients must send as a bearer token. All users of this machine "
            "can read command lines: prefer the environment variable WEFT_API_KEY or the --config file."
        ),
    ] = ()
    admin_key: Annotated[
        tuple[str, ...],
        Meta(
            description="Key(s) for the admin routes (abort, drain). Without a key the admin routes "
            "are closed. Prefer the environment variable WEFT_ADMIN_KEY or the --config file."
        ),
    ] = ()
    open_metrics: Annotated[bool, Meta(description="Serve /metrics and /metrics/history without a key.")] = (
        False
    )
    root_path: Annotated[
        str | None,
        Meta(
            description="Path under which a proxy publishes this server, e.g. /llm. Requests with and "
            "without the path are accepted."
        ),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Web origins, e.g. https://example.org, that may use the API from a browser. "
            "*: all origins."
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Accepted Host headers, e.g. example.org, without a port. *: all hosts. "
            "Default: all hosts; only this machine's names if the server listens on a loopback address "
            "without API keys."
        ),
    ] = ()
    rate_limit_requests: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 40,
            description="Maximum requests per minute and API key. Further requests get 429. 0: no "
            "limit. The limit is divided among the API servers (--fronts).",
        ),
    ] = 0
    rate_limit_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 40,
            description="Maximum prompt and output tokens per minute and API key, counted when used. "
            "Further requests get 429. 0: no limit.",
        ),
    ] = 0
    vllm_metrics: Annotated[
        bool,
        Meta(
            description="Also export the metrics under vLLM's names (vllm:), for dashboards and gateways "
            "made for vLLM."
        ),
    ] = False
    default_chat_template_kwargs: Annotated[
        str | None,
        Meta(
            description="Default variables of the chat template as a JSON object, e.g. "
            "'{\"enable_thinking\": false}'. Requests can override each variable."
        ),
    ] = None
    tool_call_parser: Annotated[
        str,
        Meta(
            description="Format of tool calls in the model's output. auto: chosen by model and chat "
            "template. none: tool calls stay text."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(
            description="Format of reasoning in the model's output. auto: chosen by model and chat "
            "template. none: reasoning stays text."
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None, Meta(description="File with a Jinja chat template that replaces the model's template.")
    ] = None
    generation_config: Annotated[
        str,
        Meta(
            description="Default sampling parameters of requests. auto: from generation_config.json in the "
            "model's folder. none (or vllm): Weft's own. Otherwise a folder with generation_config.json.",
            extra={"reader": spelled({"vllm": "none"})},
        ),
    ] = "auto"
    scripted: Annotated[
        str | None,
        Meta(description="File with scripted outputs, for a server without a model (docs/scripted.md)."),
    ] = None
    pooling: Annotated[
        Literal["auto", "last", "mean", "cls"],
        Meta(
            description="Pooling of final hidden states for /v1/embeddings: the last token, the mean of "
            "all tokens, or the first token (cls), as vectors of length 1. auto: as the checkpoint's "
            "modules.json says, else last."
        ),
    ] = "auto"
    max_request_bytes: Annotated[int, Meta(ge=1024, description="Maximum bytes of a request body.")] = 8 << 20
    max_response_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="Maximum bytes of logprobs and echoed prompts in one response without "
            "streaming, and of rendered parameters. Larger responses must be streamed.",
        ),
    ] = 64 << 20
    responses_store_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of memory for stored /v1/responses, which previous_response_id can "
            "name. The oldest responses are dropped first. 0: store none.",
        ),
    ] = 64 << 20
    batch_dir: Annotated[
        str | None,
        Meta(
            description="Folder for /v1/files and /v1/batches. The folder is made if missing. All API "
            "servers of one host may share a folder. Default: no files and no batches."
        ),
    ] = None
    batch_retention: Annotated[
        float, Meta(gt=0, le=3650, description="Days after which files and ended batches are deleted.")
    ] = 7.0
    batch_max_files: Annotated[int, Meta(ge=1, description="Maximum number of files per API key.")] = 1000
    batch_max_bytes: Annotated[
        str,
        Meta(description="Maximum bytes of all files per API key, e.g. 10G.", extra={"size": True}),
    ] = "10G"
    batch_max_lines: Annotated[
        int,
        Meta(ge=1, description="Maximum lines without an answer per API key, over all its batches."),
    ] = 200_000
    batch_online_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Maximum share of the slots for lines of batches while online requests run, and for "
            "30 s after. Alone, batches use all slots.",
        ),
    ] = 0.0625
    batch_max_open: Annotated[
        int, Meta(ge=1, description="Maximum number of batches per API key that have not ended.")
    ] = 100
    keep_attribution_lines: Annotated[
        bool,
        Meta(
            description="Keep the attribution lines that some clients put before the instructions in "
            "/v1/messages. The lines differ in each call, so prompts then share no prefix."
        ),
    ] = False
    build_ops: Annotated[
        bool,
        Meta(
            description="Compile missing C++ operations while the server runs (requires g++ or "
            "clang++). Engines start with torch's operations, and change to the C++ operations when no "
            "request runs."
        ),
    ] = False
    drain_timeout: Annotated[
        float, Meta(ge=0, description="Seconds for running requests to finish after SIGTERM.")
    ] = 30.0
    request_timeout: Annotated[
        float, Meta(gt=0, description="Maximum seconds per request. Slower requests get 504.")
    ] = 3600.0
    engine_timeout: Annotated[
        float, Meta(gt=0, description="Seconds without progress until an engine counts as dead.")
    ] = 120.0
    routing_policy: Annotated[
        Literal["prefix", "least-load", "round-robin", "two-choices"],
        Meta(
            description="Choice of the engine for a request. prefix: the least loaded engine, without "
            "load for cached prompt tokens. least-load: the least loaded engine. round-robin: the next "
            "engine. two-choices: the less loaded of two random engines."
        ),
    ] = "prefix"
    engine_restarts: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Maximum restarts per group within 10 minutes. One more failure stops the "
            "group. Requests in flight resume after each restart. The same limit holds for API servers "
            "if there are several.",
        ),
    ] = 5
    spare_processes: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Number of spare processes, which have all imports done and replace a dead "
            "engine or worker faster. Each spare takes about 160 MB. 0: no spares.",
        ),
    ] = 1
    recovery_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=86400,
            description="Maximum seconds that requests wait for a restarted engine. Then the requests "
            "get 503.",
        ),
    ] = 120.0
    models_dir: Annotated[
        str | None,
        Meta(
            description="Folder of models for a server of several models: each subfolder with config.json, "
            "and each GGUF file, is a model."
        ),
    ] = None
    models_memory: Annotated[
        str | None,
        Meta(
            description="Maximum memory of all loaded models of a server of several models, e.g. 16G. With "
            "the limit, models load on their first request, and idle models make room.",
            extra={"size": True},
        ),
    ] = None
    models_ttl: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description="Seconds without a request after which a model of a server of several models is "
            "unloaded. 0: never.",
        ),
    ] = 0.0
    model_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=86400,
            description="Maximum seconds that a request waits for a model that is not loaded. Then the "
            "request gets 503.",
        ),
    ] = 120.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Minimum level of log lines.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(
            description="Format of log lines. json: one object per line with ts, level, process, logger, "
            "message."
        ),
    ] = "text"
    log_requests: Annotated[
        bool,
        Meta(
            description="Log one line per request: id, number of the API key, model, tokens, times and "
            "finish reason. Prompts and outputs are not logged."
        ),
    ] = False

    @property
    def log_settings(self) -> str:
        """Level and format of the log as one string, for ``weft.common.log.configure``."""
        return joined(self.log_level, self.log_format)


def check_front(front: FrontSection) -> None:
    """Check values that the types of the flags cannot express. Raise ConfigError."""
    if front.root_path and not _ROOT_PATH.fullmatch(front.root_path):
        raise ConfigError(
            "--root-path must be a path such as /llm, without / at the end", param="--root-path"
        )
    for flag, keys in (("--api-key", front.api_key), ("--admin-key", front.admin_key)):
        if any(not (key.isascii() and key.isprintable()) for key in keys):
            raise ConfigError(f"{flag} must be printable ASCII, as it is sent in a header", param=flag)
    # A key in both lists would give ordinary clients the admin routes.
    if set(front.api_key) & set(front.admin_key):
        raise ConfigError("--admin-key has a key of --api-key: choose different keys", param="--admin-key")
    if any(not _ORIGIN.fullmatch(origin) for origin in front.allowed_origins):
        raise ConfigError(
            "--allowed-origins must be *, or origins as browsers send them: https://example.org, "
            "http://localhost:3000",
            param="--allowed-origins",
        )
    if any(not _HOST.fullmatch(host) for host in front.allowed_hosts):
        raise ConfigError(
            "--allowed-hosts must be *, or names or addresses without a port: example.org, 10.0.0.7, ::1",
            param="--allowed-hosts",
        )
    template_variables(front)


def template_variables(front: FrontSection) -> dict[str, Any]:
    """Return the parsed ``--default-chat-template-kwargs``.

    Raise ConfigError unless the value is a JSON object.
    """
    flag = "--default-chat-template-kwargs"
    try:
        found = json.loads(front.default_chat_template_kwargs or "{}")
    # RecursionError: deeply nested JSON.
    except (ValueError, RecursionError):
        raise ConfigError(f"{flag} is not valid JSON", param=flag) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} must be a JSON object", param=flag)
    return found
