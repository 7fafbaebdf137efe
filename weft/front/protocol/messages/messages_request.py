"""Bodies of requests of the Messages API.

``cache_control`` is accepted wherever the API has the field, without effect: the prefix cache keeps as much
as possible of every prompt. Labels (``metadata``, ``user_profile_id`` ...) have no effect either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.fields import is_one_of
from weft.front.protocol.parse import Body, between, short
from weft.types.sampling import StopIn

MAX_LABEL = 4096
"""Maximum characters of a label. Agents put JSON into ``metadata.user_id``."""
# fmt: off
UNSUPPORTED = frozenset((
    "container", "mcp_servers", "diagnostics", "speed", "inference_geo", "fallbacks", "billing_policy",
    "compaction", "fallback_credit_token", "thread",
))
# fmt: on


class _MessagesStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Metadata(_MessagesStruct, frozen=True, kw_only=True):
    """Labels."""

    user_id: str | None = None


class Enabled(_MessagesStruct, frozen=True, kw_only=True, tag="enabled", tag_field="type"):
    """Reason, for at most ``budget_tokens`` tokens."""

    budget_tokens: int
    display: Literal["summarized", "omitted"] | None = None


class Adaptive(_MessagesStruct, frozen=True, kw_only=True, tag="adaptive", tag_field="type"):
    """Leave reasoning to the model."""

    display: Literal["summarized", "omitted"] | None = None


class Disabled(_MessagesStruct, frozen=True, kw_only=True, tag="disabled", tag_field="type"):
    """Do not reason."""


Thinking = Enabled | Adaptive | Disabled


class SchemaFormat(_MessagesStruct, frozen=True, kw_only=True, tag="json_schema", tag_field="type"):
    """JSON valid under a schema."""

    schema: dict[str, Any]


class OutputConfig(_MessagesStruct, frozen=True, kw_only=True):
    """Form of the answer, and reasoning effort."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class _Choice(_MessagesStruct, frozen=True, kw_only=True):
    disable_parallel_tool_use: bool | None = None


class ChooseAuto(_Choice, frozen=True, kw_only=True, tag="auto", tag_field="type"):
    """Allow text or calls."""


class ChooseAny(_Choice, frozen=True, kw_only=True, tag="any", tag_field="type"):
    """Require at least one call."""


class ChooseTool(_Choice, frozen=True, kw_only=True, tag="tool", tag_field="type"):
    """Require a call of this tool."""

    name: str


class ChooseNone(_Choice, frozen=True, kw_only=True, tag="none", tag_field="type"):
    """Allow no call."""


ToolChoice = ChooseAuto | ChooseAny | ChooseTool | ChooseNone


class CountRequest(Body, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens, and the parameters common to both routes."""

    neutral: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        "tools": is_one_of([]),
        "stop_sequences": is_one_of([]),
        "mcp_servers": is_one_of([]),
        "speed": is_one_of("standard"),
        "diagnostics": is_one_of({}),
        "output_config": is_one_of({}),
        "context_management": is_one_of({}),
    }
    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED

    model: str | None = None
    """Model name; default: the server's model."""
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None
    """Older name of ``output_config.format``."""
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    """Only an edit without effect is accepted: ``clear_thinking`` that keeps all."""
    betas: list[str] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    def check(self) -> None:
        """Raise InvalidRequest for parameters that are out of range, unsupported or exclude each other."""
        if self.model is not None:
            short("model", self.model)
        for label in ("user_profile_id", "workspace_id"):
            if (text := getattr(self, label)) is not None:
                short(label, text)
        if not self.messages:
            raise InvalidRequest("messages must hold at least one message", param="messages")
        if isinstance(self.thinking, Enabled):
            between("thinking.budget_tokens", self.thinking.budget_tokens, 1, 1 << 31)
        # `output_format` is the old name of `output_config.format`: only one of both may be set.
        if self.output_format is not None and self.form is not self.output_format:
            raise InvalidRequest(
                "output_format and output_config.format are the same setting; send only one of the two",
                param="output_format",
            )
        for edit in self._edits():
            if edit != {"type": "clear_thinking_20251015", "keep": "all"}:
                raise InvalidRequest(
                    "context_management: this server does not edit the context; the only accepted edit is "
                    '{"type": "clear_thinking_20251015", "keep": "all"}',
                    param="context_management",
                    code="unsupported_parameter",
                )

    def _edits(self) -> list[Any]:
        """Return the edits of the context. Raises InvalidRequest for another form."""
        asked = dict(self.context_management or {})
        edits = asked.pop("edits", [])
        if asked or not isinstance(edits, list):
            raise InvalidRequest(
                "context_management must have only the key edits, with a list", param="context_management"
            )
        return edits

    @property
    def form(self) -> SchemaFormat | None:
        """Required form of the answer; None without a form."""
        config = self.output_config
        return self.output_format if config is None or config.format is None else config.format


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stop_in: StopIn | None = None
    """Scope of stop sequences: text blocks only (the default), or the whole output."""
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def check(self) -> None:
        """Raise InvalidRequest for a parameter out of range, besides the checks of ``CountRequest``."""
        super().check()
        between("max_tokens", self.max_tokens, 1, 1 << 31)
        label = None if self.metadata is None else self.metadata.user_id
        if label is not None and len(label) > MAX_LABEL:
            raise InvalidRequest(
                f"metadata.user_id must have at most {MAX_LABEL} characters", param="metadata"
            )
