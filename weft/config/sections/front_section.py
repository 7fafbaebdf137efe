"""Settings of the HTTP server; see ``sections``."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from msgspec import Meta

from weft.common.errors import ConfigError
from weft.common.log import joined
from weft.config.sections.parallel_section import Section

_ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.\-]+(:\d{1,5})?/?|https?://\[[0-9A-Fa-f:.]+\](:\d{1,5})?/?")
_HOST = re.compile(r"\*|[A-Za-z0-9._\-]+|\[?[0-9A-Fa-f:.]+\]?")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


class FrontSection(Section, frozen=True, kw_only=True):
    """The HTTP server."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 8000
    fronts: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Processes that answer HTTP, on one port and with the same engines behind them. "
            "Of several, one that dies takes its own connections with it and no others.",
        ),
    ] = 1
    api_key: Annotated[
        tuple[str, ...],
        Meta(
            description="Key(s) that clients must send as a bearer token. All users of this machine can see "
            "command lines: better set the environment variable WEFT_API_KEY, or the key in --config's file."
        ),
    ] = ()
    admin_key: Annotated[
        tuple[str, ...],
        Meta(
            description="Key(s) for the routes that control the server (abort, drain), which are closed "
            "without one. Better in the environment variable WEFT_ADMIN_KEY, or in --config's file."
        ),
    ] = ()
    open_metrics: Annotated[
        bool, Meta(description="Answer /metrics without a key, for a Prometheus that has none.")
    ] = False
    root_path: Annotated[
        str | None,
        Meta(
            description="Path under which a proxy shows this server, e.g. /llm. Requests may bring the path "
            "or leave it out."
        ),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Web origins (https://example.org) whose pages may use the API from a browser; "
            "* for all."
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Names (example.org, without a port) under which clients may ask the server; * for "
            "all. Without it a server on a loopback address without API keys takes only this machine's own."
        ),
    ] = ()
    rate_limit_requests: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 40,
            description="Requests of one API key a minute; beyond it they get 429. 0: no limit. Each of "
            "several fronts has its part of it.",
        ),
    ] = 0
    rate_limit_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 40,
            description="Tokens of one API key's prompts and outputs a minute, counted as they are used; "
            "beyond it requests get 429. 0: no limit.",
        ),
    ] = 0
    vllm_metrics: Annotated[
        bool,
        Meta(description="Give all metrics under vllm: too, for dashboards and gateways made for vLLM."),
    ] = False
    default_chat_template_kwargs: Annotated[
        str | None,
        Meta(
            description="Variables of the chat template where a request sets none, as a JSON object, e.g. "
            "'{\"enable_thinking\": false}'."
        ),
    ] = None
    tool_call_parser: Annotated[
        str,
        Meta(
            description="Format of tool calls in the model's output; auto: by the model and its template; "
            "none: they are text."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(
            description="Format of thoughts in the model's output; auto: by the model and its template; "
            "none: they are text."
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None, Meta(description="File with a chat template to use instead of the model's.")
    ] = None
    scripted: Annotated[
        str | None,
        Meta(description="File of outputs that are played to requests, without a model (docs/scripted.md)."),
    ] = None
    pooling: Annotated[
        Literal["last", "mean"],
        Meta(
            description="What /v1/embeddings makes of a prompt's final hidden states: the last one, or the "
            "mean of all. Vectors have length 1."
        ),
    ] = "last"
    max_request_bytes: Annotated[int, Meta(ge=1024, description="Largest request body.")] = 8 << 20
    max_response_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="Logprobs and repeated prompts that one answer may hold; more must be streamed.",
        ),
    ] = 64 << 20
    responses_store_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Memory for answers of /v1/responses that previous_response_id may name; 0 stores "
            "none. The oldest go first.",
        ),
    ] = 64 << 20
    keep_attribution_lines: Annotated[
        bool,
        Meta(
            description="Leave lines that clients put before their instructions to be billed by in the "
            "prompts of /v1/messages: they differ at each call, so prompts share no prefix."
        ),
    ] = False
    build_ops: Annotated[
        bool,
        Meta(
            description="Compile the C++ operations beside the server where this machine has none (needs g++ "
            "or clang++). Engines begin on torch's operations, and all change at once when no request runs."
        ),
    ] = False
    drain_timeout: Annotated[
        float, Meta(ge=0, description="Seconds that running requests get to finish after SIGTERM.")
    ] = 30.0
    request_timeout: Annotated[
        float, Meta(gt=0, description="Seconds that one request may take before it gets 504.")
    ] = 3600.0
    engine_timeout: Annotated[
        float, Meta(gt=0, description="Seconds without progress after which the engine counts as dead.")
    ] = 120.0
    routing_policy: Annotated[
        Literal["prefix", "least-load", "round-robin", "two-choices"],
        Meta(
            description="Which engine gets a request. prefix: the least loaded, where cached tokens count as "
            "no load; least-load; round-robin; two-choices: the less loaded of two random ones."
        ),
    ] = "prefix"
    engine_restarts: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Heads of each group that are started again in 10 minutes when they died; requests "
            "go on then. One more ends the group. As many fronts, where there are several.",
        ),
    ] = 5
    spare_processes: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Processes that have imported all that heads and workers need, about 160 MB each, "
            "and wait to take the place of one that died. 0: such a one starts from nothing.",
        ),
    ] = 1
    recovery_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=86400,
            description="Seconds that requests wait for an engine that is started again; then they get 503.",
        ),
    ] = 120.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Amount of logging.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(description="Form of log lines. json: an object a line: ts, level, process, logger, message."),
    ] = "text"
    log_requests: Annotated[
        bool,
        Meta(
            description="Log one line for each request: id, number of the key, model, tokens, times and the "
            "end. No text of a user is logged."
        ),
    ] = False

    @property
    def log_settings(self) -> str:
        """Level and format of the log as one string, for ``weft.common.log.configure``."""
        return joined(self.log_level, self.log_format)


def check_front(front: FrontSection) -> None:
    """Check values that the types of the flags cannot express. Raise ConfigError."""
    if front.root_path and not _ROOT_PATH.fullmatch(front.root_path):
        raise ConfigError("--root-path must be a path such as /llm, without a last /", param="--root-path")
    for flag, keys in (("--api-key", front.api_key), ("--admin-key", front.admin_key)):
        if any(not (key.isascii() and key.isprintable()) for key in keys):
            raise ConfigError(f"{flag} must be printable ASCII, as it is sent in a header", param=flag)
    # A key in both lists would give ordinary clients the admin routes.
    if set(front.api_key) & set(front.admin_key):
        raise ConfigError("--admin-key must not be an --api-key, too", param="--admin-key")
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
