"""Settings of the KV cache events; one of the sections (see ``sections``)."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta

from weft.common.errors import ConfigError
from weft.config.sections.parallel_section import Section

_TCP = re.compile(r"tcp://[^/\s]+:(\d{1,5})")


class EventsSection(Section, frozen=True, kw_only=True):
    """KV cache events for routers of other projects."""

    kv_events_endpoint: Annotated[
        str | None,
        Meta(
            description="Publish each change of the prefix cache at this zmq address, in vLLM's format. "
            "An address with * or ::, and ipc://, is bound; any other address is connected to. Engine N "
            "adds N to the port. Events contain the token ids of prompts. Default: no events."
        ),
    ] = None
    kv_events_replay_endpoint: Annotated[
        str | None,
        Meta(description="Bind this zmq address and answer requests for past events there. Engine N adds N."),
    ] = None
    kv_events_topic: Annotated[
        str | None,
        Meta(description="Topic of the events, e.g. kv@POD@MODEL for llm-d. Default: the empty topic."),
    ] = None
    kv_events_buffer: Annotated[
        int,
        Meta(ge=1, le=1 << 20, description="Past batches of events kept for replay, at most 64 MiB."),
    ] = 10000
    kv_events_format: Annotated[
        Literal["map", "array"],
        Meta(description="map: events as vLLM 0.24 and later sends. array: events of earlier vLLM versions."),
    ] = "map"


def address_of(endpoint: str, number: int) -> str:
    """Return the address of engine ``number`` for the setting ``endpoint``: engine N adds N to a port, and
    ``-N`` to any other address. Engine 0 has the setting itself.
    """
    found = _TCP.fullmatch(endpoint)
    if number == 0:
        return endpoint
    if found is None:
        return f"{endpoint}-{number}"
    return f"{endpoint[: found.start(1)]}{int(found[1]) + number}"


def is_bound(endpoint: str) -> bool:
    """Return True if an address of events is bound, False if it is connected to. The rule is vLLM's."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def check_events(events: EventsSection, highest: int = 0) -> None:
    """Raise ConfigError for an address in a wrong form, for a setting without an address of events, and for
    two addresses that meet when engines 0 to ``highest`` of the host bind their own addresses.
    """
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        endpoint, flag = getattr(events, name), "--" + name.replace("_", "-")
        if endpoint is None:
            continue
        found = _TCP.fullmatch(endpoint)
        if found is None and not (endpoint.startswith("ipc://") and len(endpoint) > len("ipc://")):
            raise ConfigError(
                f"{flag} must be an address such as tcp://*:5557 or ipc:///run/weft/events", param=flag
            )
        # zmq would take port 0 as any free port, and no router could know the port.
        if found is not None and not 0 < int(found[1]) < (1 << 16) - highest:
            raise ConfigError(f"{flag} needs a port from 1 to {65535 - highest}", param=flag)
        if name == "kv_events_endpoint" and endpoint.startswith("tcp://0.0.0.0:"):
            raise ConfigError(
                f"{flag} {endpoint} names an address to connect to; write "
                f"tcp://*:{endpoint.rpartition(':')[2]} to listen on all addresses",
                param=flag,
            )
    if events.kv_events_replay_endpoint is not None and events.kv_events_endpoint is None:
        raise ConfigError(
            "--kv-events-replay-endpoint needs --kv-events-endpoint", param="--kv-events-replay-endpoint"
        )
    _check_apart(events, highest)


def _check_apart(events: EventsSection, highest: int) -> None:
    """Raise ConfigError if one engine publishes events at the address where another answers replays."""
    first, second = events.kv_events_endpoint, events.kv_events_replay_endpoint
    if first is None or second is None or not is_bound(first):
        return
    places = [[_place(address_of(one, number)) for number in range(highest + 1)] for one in (first, second)]
    if set(places[0]) & set(places[1]):
        flag = "--kv-events-replay-endpoint"
        raise ConfigError(
            f"{flag} {second} overlaps with --kv-events-endpoint {first}: engine N adds N to both ports, and "
            f"the highest N of this host is {highest}. Choose ports that are further apart, e.g. 5557 and "
            "5657",
            param=flag,
        )


def _place(endpoint: str) -> str:
    """Return what two sockets of a host cannot share: the port, or the whole address."""
    found = _TCP.fullmatch(endpoint)
    return endpoint if found is None else found[1]
