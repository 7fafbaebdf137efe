"""``weft verify --topology FILE`` and ``--prefill P --decode D``: groups must give the tokens of one engine.

The groups are real processes as in ``weft up``, without HTTP: engines, messages and the fleet are the same.
All run in float64, all prompts together, and every second prompt is sampled. With encode groups, prompts have
images.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from weft.cli.reference import Reference
from weft.cli.verify.tiny import FAMILIES, write_family
from weft.cli.verify.verify_images import image_counters, with_pictures
from weft.cli.verify.verify_layout import tiny_model
from weft.cli.verify.verify_run import (
    ForwardOnly,
    Say,
    first_difference,
    generate,
    greedy_agrees,
    make_prompts,
    report,
    submit_of,
)
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.config.hub import resolve_model_path
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.config.sections.all import Config, ParallelSection, SpeculationSection, TransferSection
from weft.config.topology import Topology, face, read_topology, resolve_groups
from weft.engine.core import EngineCore
from weft.engine.server.replicas import Replicas
from weft.types.messages import EngineStats, Role, Submit
from weft.types.sampling import TokenParams

SAMPLED = 0.8
"""Temperature of every second prompt."""


def topology_of(file: str, given: Mapping[str, Any], model: str | None) -> Topology:
    """Return the topology of ``file``, with ``model`` (if given) in place of the file's model.

    ``given``: settings of the command line. Raise ConfigError for settings that belong into the file, or for
    several hosts.
    """
    others = [name for name in given if name != "log_level"]
    if others:
        flag = f"--{others[0].replace('_', '-')}"
        raise ConfigError(
            f"{flag} and --topology exclude each other: write {flag} in {Path(file).name}", param=flag
        )
    topology = read_topology(file, given)
    if any(group.config.parallel.hosts > 1 for group in topology.groups):
        raise ConfigError(
            f"{Path(file).name} has several hosts, and verify runs on one host", param="--topology"
        )
    return topology if model is None else _changed(topology, model=model)


def against_alone(topology: Topology, count: int, tokens: int, say: Say) -> bool:
    """Compare the groups' tokens with those of one engine that computes one prompt at a time; report with
    ``say``.

    The single engine uses no drafts. Return True unless there is a defect or a requested feature took no
    part. Raise WeftError if a prompt fails.
    """
    doubles = _changed(topology, dtype="float64")
    groups = resolve_groups(doubles)
    alone = _alone(_first(doubles), groups)
    prompts = make_prompts(alone, count, tokens)
    params = [TokenParams(temperature=SAMPLED * (n % 2), max_tokens=tokens) for n in range(len(prompts))]
    asked = [submit_of(number, prompts[number], tokens, params) for number in range(len(prompts))]
    vision = face(groups).spec.vision
    if _encode(groups) and vision is not None:
        asked = with_pictures(asked, prompts, vision.media, alone.kv.max_model_len - tokens)
    expected = _one_by_one(alone, asked)
    found, good = _groups_answer(groups, asked, say)
    equal = 0
    for number, (mine, one) in enumerate(zip(found, expected, strict=True)):
        if mine == one:
            equal += 1
            continue
        at = first_difference(mine, one)
        place, ids = f"prompt {number}, token {at}", (mine[at], one[at])
        # Ties are only checked for greedy text prompts: sampling adds noise to the scores, and
        # ``ForwardOnly`` takes no images.
        if number % 2 or asked[number].media:
            how = "sampled" if number % 2 else f"of {len(asked[number].media)} images"
            say(f"{place} ({how}) differs: groups {ids[0]}; alone {ids[1]}: DEFECT")
            good = False
            continue
        row = ForwardOnly(alone).logits(prompts[number] + one[:at])[-1]
        good = report(say, place, ids, (row, row), ("groups", "alone")) and good
    say(f"tokens in float64: {equal} of {len(prompts)} prompts equal to the engine alone")
    return good


def against_reference(topology: Topology, path: str, count: int, tokens: int, say: Say) -> bool:
    """Compare the groups' greedy tokens with those of ``transformers``; report with ``say``.

    Return True unless there is a defect or a requested feature took no part. Raise ConfigError without
    ``transformers``, WeftError if a prompt fails.
    """
    doubles = _changed(topology, dtype="float64")
    groups = resolve_groups(doubles)
    config = _first(doubles)
    alone = _alone(config, groups)
    path = resolve_model_path(path, config.model.revision)
    prompts = make_prompts(alone, count, tokens)
    params = [TokenParams(temperature=0.0, max_tokens=tokens) for _ in prompts]
    asked = [submit_of(number, prompts[number], tokens, params) for number in range(len(prompts))]
    if _encode(groups):
        say("no prompt has images: prompts with images are compared only with the engine alone")
    found, good = _groups_answer(groups, asked, say)
    reference = Reference(config, path, "float64")
    return greedy_agrees(alone, reference, prompts, found, tokens, say, "groups") and good


def families(topology: Topology, count: int, tokens: int, say: Say) -> bool:
    """Run ``against_alone`` for a tiny random model of every family; report with ``say``.

    Return True if all pass. Families that cannot use the topology are skipped.
    """
    good = True
    with tempfile.TemporaryDirectory(prefix="weft-verify-") as folder:
        for name in FAMILIES:
            path = write_family(Path(folder), name)
            # Skip families that cannot use the topology: no experts to divide, or no images to encode.
            divided = any(one.config.parallel.enable_expert_parallel for one in topology.groups)
            if divided and load_spec(str(path), None).moe is None:
                say(f"-- {name}: has no experts to divide")
                continue
            if _encodes(topology) and load_spec(str(path), None).vision is None:
                say(f"-- {name}: has no images to encode")
                continue
            say(f"-- {name} ({FAMILIES[name][0]}, random weights)")
            good = against_alone(_changed(topology, **tiny_model(path)), count, tokens, say) and good
    return good


def _changed(topology: Topology, **model: Any) -> Topology:
    """Return ``topology`` with changed model settings in every group."""
    groups = []
    for group in topology.groups:
        section = msgspec.structs.replace(group.config.model, **model)
        groups.append(group._replace(config=msgspec.structs.replace(group.config, model=section)))
    return topology._replace(groups=tuple(groups))


def _first(topology: Topology) -> Config:
    """Return the configuration of the first group that makes tokens."""
    return next(one.config for one in topology.groups if one.config.transfer.role != "encode")


def _encodes(topology: Topology) -> bool:
    """Return True if the topology has encode groups."""
    return any(one.config.transfer.role == "encode" for one in topology.groups)


def _encode(groups: Iterable[EngineConfig]) -> bool:
    """Return True if any group encodes images."""
    return any(group.transfer.role == "encode" for group in groups)


def _alone(config: Config, groups: tuple[EngineConfig, ...]) -> EngineConfig:
    """Return one process with the groups' model, weights and caches, without reuse between prompts."""
    replace = msgspec.structs.replace
    model = replace(config.model, max_model_len=face(groups).kv.max_model_len)
    if _encode(groups):
        model = replace(model, language_model_only=False)
    one = replace(
        config,
        model=model,
        cache=replace(config.cache, enable_prefix_caching=False),
        scheduler=replace(config.scheduler, steps_in_flight=1),
        parallel=ParallelSection(),
        speculation=SpeculationSection(),
        transfer=TransferSection(),
    )
    return resolve(one)


def _one_by_one(config: EngineConfig, asked: Sequence[Submit]) -> list[list[int]]:
    """Return the tokens of each prompt, computed alone. Raise WeftError if a prompt fails."""
    core = EngineCore(config, progress=False)
    try:
        return [generate(core, [one])[one.sequence] for one in asked]
    finally:
        core.close()


def _groups_answer(
    groups: tuple[EngineConfig, ...], asked: Sequence[Submit], say: Say
) -> tuple[list[list[int]], bool]:
    """Return (tokens of each prompt, True if all requested features took part).

    Reports counters and idle instances with ``say``. Raise WeftError if a prompt fails.
    """
    engine = Replicas(groups)
    try:
        found = generate(engine, asked)
        stats = engine.stats_of()
        local = engine.thread.links.local_prefills
    finally:
        engine.close()
    for name, (role, one) in stats.items():
        say(f"{name}: {_done(role, one)}")
    if local:
        say(f"{local} prompts were computed by decode groups, because no prefill group was available")
    missing = [*_idle(stats, any(one.media for one in asked)), *_speculation(groups, stats)]
    for what in missing:
        say(f"{what} did NOT ENGAGE, so the comparison proves nothing; give more --prompts or --tokens")
    return [found[one.sequence] for one in asked], not missing


def _done(role: Role, stats: EngineStats) -> str:
    """Return the counters of an instance of ``role`` as text."""
    if role == "encode":
        return image_counters(stats, encodes=True)
    images = "" if stats.embedding_transfers is None else f", {image_counters(stats, encodes=False)}"
    moved = stats.transfers
    if moved is None:
        return f"{stats.prompt_tokens} prompt tokens, {stats.generation_tokens} output tokens{images}"
    transfers = f"{moved.done} KV transfers done, {moved.failed} failed"
    if role == "prefill":
        return f"{stats.prompt_tokens} prompt tokens, {transfers}, {moved.sent_bytes} bytes sent{images}"
    return f"{transfers}, {moved.received_bytes} bytes received, {stats.generation_tokens} output tokens"


def _idle(stats: Mapping[str, tuple[Role, EngineStats]], images: bool) -> Iterator[str]:
    """Yield the names of idle instances. ``images``: True if prompts have images.

    If the server has prefill and decode groups, unified groups may be idle.
    """
    pairs = {"prefill", "decode"} <= {role for role, _ in stats.values()}
    for name, (role, one) in stats.items():
        moved = one.transfers if role != "encode" else one.embedding_transfers
        # Transfers prove the part of all other roles; a unified group has no transfers.
        if role == "unified":
            if not pairs and not one.generation_tokens:
                yield name
        elif role == "encode" and not images:
            continue
        elif moved is None or not moved.done or not (moved.sent_bytes or moved.received_bytes):
            yield name


def _speculation(
    groups: Iterable[EngineConfig], stats: Mapping[str, tuple[Role, EngineStats]]
) -> Iterator[str]:
    """Yield --speculative-method if speculation is configured but no draft was made."""
    asked = any(group.speculation.speculative_method != "none" for group in groups)
    if asked and not any(sum(one.drafts) for _, one in stats.values()):
        yield "--speculative-method"
