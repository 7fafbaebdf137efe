"""Routing with separate prefill and decode instances: partners, the route of a prompt, and the Submits sent.

A *pair* is a prefill instance and a decode instance whose engines have equal fingerprints. All sequences of a
prompt go to one pair, each with a transfer of its own. An instance with neither role does both. Encode
instances get a part, too: see ``weft.control.fleet.encoders``. Pure except for the memory of policies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from weft.control.fleet.encoders import choose, divided_submit, encodes_for, sees
from weft.control.fleet.instances import Instance
from weft.control.fleet.ledger import LedgerEntry
from weft.control.fleet.policy import Hashes, Policies, hashes_of
from weft.types.adapters import AdapterChanged
from weft.types.media_item import without_pixels
from weft.types.messages import Heartbeat, PrefixIndex, Submit
from weft.types.transfer import Peer, TransferKey, TransferParameters
from weft.types.weights import WeightsChanged

Report: TypeAlias = Heartbeat | PrefixIndex | AdapterChanged | WeightsChanged
"""A message of an engine process about its own state."""


class Route(NamedTuple):
    """The instances for the sequences of one prompt."""

    compute: Instance
    """The instance that computes the prompt."""
    decode: Instance | None = None
    """The instance that continues after the first token; None if ``compute`` continues."""
    encoders: tuple[Instance, ...] = ()
    """The encode instance of each image of the prompt; () without images, or if ``compute`` encodes."""


def are_partners(prefill: Instance, decode: Instance) -> bool:
    """Return True if ``decode`` can continue prompts of ``prefill``, by the present processes of both."""
    if prefill.role != "prefill" or decode.role != "decode":
        return False
    one, other = prefill.welcome, decode.welcome
    if one is None or other is None or not one.transfer_address or not other.transfer_address:
        return False
    return bool(one.fingerprint) and one.fingerprint == other.fingerprint


def serve(instances: Iterable[Instance], local: bool) -> bool:
    """Return True if ``instances`` can serve requests; with ``local``, decode instances also prefill."""
    given = list(instances)
    if any(one.role == "unified" or (local and one.role == "decode") for one in given):
        return True
    return any(are_partners(one, other) for one in given for other in given)


def without_partner(instances: Iterable[Instance]) -> list[Instance]:
    """Return the prefill and decode ``instances`` without a partner among the others."""
    given = list(instances)
    paired = {id(one) for a in given for b in given if are_partners(a, b) for one in (a, b)}
    return [one for one in given if one.role in ("prefill", "decode") and id(one) not in paired]


def why_lonely(instance: Instance, others: Iterable[Instance]) -> str | None:
    """Return the reason why none of ``others`` is a partner of ``instance``.

    None if there is a partner, or if no instance with the opposite role has answered yet.
    """
    role = {"prefill": "decode", "decode": "prefill"}.get(instance.role or "")
    opposite = [one for one in others if one.role == role and one.welcome is not None]
    if instance.welcome is None or not opposite:
        return None
    if any(are_partners(instance, one) or are_partners(one, instance) for one in opposite):
        return None
    # Different fingerprints are the last explanation: an engine without one was started without a role.
    for one in (instance, *opposite):
        if one.welcome is not None and not (one.welcome.transfer_address and one.welcome.fingerprint):
            return f"{one.name} has no KV transfers; start {one.name} with --role"
    names = ", ".join(one.name for one in opposite)
    return (
        f"model, weights, dtype or cache layout differ from {names}; start both with the same "
        "--model, --revision, --dtype, --quantization and --kv-cache-dtype"
    )


class Router:
    """Chooses instances for prompts."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self.weights = 0
        """Version of the weights for new attempts. Instances with another version get none."""

    @property
    def decisions(self) -> dict[str, int]:
        """Counts of decisions, see ``Policies.decisions``."""
        return self._policies.decisions

    def weights_name(self, instances: Iterable[Instance]) -> bytes:
        """Return the name of the weights for new attempts in the hashes of prefixes, as one of ``instances``
        has reported."""
        return next((one.weights_name for one in instances if one.weights == self.weights), b"")

    def wants_prefixes(self, instance: Instance) -> bool:
        """Return True if ``instance``, which is up, should report cached prefixes."""
        return self._policies.knows_prefixes and instance.role != "encode"

    def report(self, instance: Instance, message: Report, now: float) -> bool:
        """Store the reported load, cached prefixes or LoRA adapter of ``instance``, and update the policies.

        Return False if a report was missed, so the whole index must be sent again.
        """
        if isinstance(message, AdapterChanged):
            instance.adapter_changed(message)
        elif isinstance(message, WeightsChanged):
            instance.weights_changed(message)
        elif isinstance(message, Heartbeat):
            instance.heartbeat(message, now)
        elif not instance.prefixes.take(message):
            return False
        for policy in self._policies:
            policy.observe(instance, isinstance(message, Heartbeat) and message.idle)
        return True

    def route(
        self,
        takers: Sequence[Instance],
        entry: LedgerEntry,
        near: Collection[str] = (),
        local: bool = False,
        encoders: Sequence[Instance] | None = None,
    ) -> Route | None:
        """Return the route for the sequences of one prompt; None if the sequences have to wait.

        ``entry`` is one of the sequences. ``takers`` are the instances that take sequences. ``near`` names
        instances with other sequences of the prompt, which are preferred. With ``local``, decode instances
        may compute the prompt if nothing else can. ``encoders`` are the instances that encode images now;
        None if each compute instance encodes its own images. Instances that refused the sequence come last.
        Changes only the memory of the policies.
        """
        if entry.pinned is not None:
            return next((Route(one) for one in takers if one.name == entry.pinned), None)
        session = entry.submit.session
        asked = entry.submit
        takers = [one for one in takers if one.has_adapter(asked.adapter) and one.weights == self.weights]
        if encoders is not None:  # embeddings and prompts are computed with the same weights
            encoders = [one for one in encoders if one.weights == self.weights]
        names = asked.adapter, self.weights_name(takers)
        hashes = hashes_of(asked.prompt_ids, asked.salt, entry.hashes, asked.media, *names)
        helped = encoders is not None and bool(entry.submit.media)
        computing = [one for one in takers if not helped or sees(one, encoders or ())]
        willing = [one for one in computing if one.name not in entry.refused]
        others = [one for one in takers if one.name not in entry.refused]
        # Avoid instances known to refuse the sequence: both of a pair, then the decode instance, then none.
        for able, decoding in ((willing, others), (computing, others), (computing, takers)):
            route = None
            if not entry.submit.pooling:
                route = self._pair(able, decoding, hashes, near, session)
            # pooling ends with the prompt, so no decode instance is needed
            elif prefill := [one for one in able if one.role == "prefill"]:
                route = Route(self._policies.compute.choose(_among(prefill, near), hashes, session))
            route = route or self._alone(able, hashes, near, local, session)
            if route is not None:
                return _with_encoders(route, entry, encoders or ()) if helped else route
        return None

    def _alone(
        self, able: Sequence[Instance], hashes: Hashes, near: Collection[str], local: bool, session: str
    ) -> Route | None:
        alone = [one for one in able if one.role == "unified"]
        alone = alone or [one for one in able if local and one.role == "decode"]
        return Route(self._policies.compute.choose(_among(alone, near), hashes, session)) if alone else None

    def _pair(
        self,
        able: Sequence[Instance],
        decoding: Sequence[Instance],
        hashes: Hashes,
        near: Collection[str],
        session: str,
    ) -> Route | None:
        """Return a pair, or None. ``able`` may compute the prompt; ``decoding`` may continue the sequence."""
        prefill = [one for one in able if one.role == "prefill"]
        if not prefill:
            return None
        decode = [one for one in decoding if any(are_partners(each, one) for each in prefill)]
        if not decode:
            return None
        # The decode instance is chosen first, then one of the partners.
        decodes = self._policies.decode.choose(_among(decode, near), hashes, session)
        partners = [one for one in prefill if are_partners(one, decodes)]
        return Route(self._policies.compute.choose(_among(partners, near), hashes, session), decodes)


def _among(instances: Sequence[Instance], names: Collection[str]) -> Sequence[Instance]:
    """Return the members of ``instances`` named in ``names``; all ``instances`` if none is named."""
    return [one for one in instances if one.name in names] or instances


def _with_encoders(route: Route, entry: LedgerEntry, encoders: Iterable[Instance]) -> Route:
    """Return ``route`` with an encode instance for each image; without any, ``compute`` encodes the images.

    Consider only the encode instances for this compute instance with the fewest refusals of the sequence.
    """
    able = [(entry.refused.get(one.name, 0), one) for one in encoders if encodes_for(one, route.compute)]
    least = min((refused for refused, _ in able), default=0)
    willing = [one for refused, one in able if refused == least]
    return route._replace(encoders=choose(willing, entry.submit.media))


def ticketed(
    route: Route, submit: Submit, seconds: float, first: bool = True
) -> list[tuple[Instance, Submit]]:
    """Return the Submit for each instance of ``route``, receivers before senders.

    A receiver should know of a transfer before the offer comes. ``seconds`` is the maximum for one transfer.
    ``first`` marks the first of a prompt's sequences: the other sequences share its images. A decode instance
    gets no pixels, and returns a sequence that it cannot continue.
    """
    compute, decode, encoders = route
    # The encode instances work once per prompt, so only the first sequence carries the images.
    parts: list[tuple[Instance, Submit]] = []
    if encoders and first:
        submit, parts = divided_submit(compute, encoders, submit, seconds)
    elif encoders:
        submit = msgspec.structs.replace(submit, media=without_pixels(submit.media))
    if decode is None:
        return [(compute, submit), *parts]
    assert compute.welcome is not None
    assert decode.welcome is not None
    # Sequence, attempt and incarnation together are unique, so no transfer can be mistaken for another.
    key = TransferKey(submit.sequence, submit.attempt, compute.incarnation)
    sends = TransferParameters(key, True, Peer(decode.welcome.transfer_address, decode.incarnation), seconds)
    receives = TransferParameters(
        key, False, Peer(compute.welcome.transfer_address, compute.incarnation), seconds
    )
    bare = tuple(msgspec.structs.replace(item, transfer=None) for item in without_pixels(submit.media))
    return [
        (decode, msgspec.structs.replace(submit, transfer=receives, media=bare)),
        (compute, msgspec.structs.replace(submit, transfer=sends)),
        *parts,
    ]
