"""``weft verify``: check of the tokens on a machine, with a model and a configuration."""

from __future__ import annotations

from typing import Any

import click

from weft.cli import options
from weft.common import log
from weft.common.errors import ConfigError
from weft.config.sections.all import Config
from weft.config.topology import Topology, short_form
from weft.config.transfers import check_transfer


@click.command(cls=options.Command)
@click.argument("model_name", metavar="[MODEL]", required=False)
@click.option(
    "--reference",
    metavar="PATH",
    help="Compare with the transformers implementation of this checkpoint (folder, hub or bundled name).",
)
@click.option(
    "--self",
    "against_self",
    is_flag=True,
    help="Compare each prompt alone with the same prompt batched, chunked, preempted, and with two "
    "steps in flight. With --kv-disk SIZE also: loaded from a disk tier in a new folder inside "
    "--kv-disk-dir, and with damaged files.",
)
@click.option(
    "--topology",
    type=click.Path(),
    metavar="FILE",
    help="Run the groups of this topology (see `weft up`), and compare with the engine alone or --reference.",
)
@click.option(
    "--families",
    is_flag=True,
    help="With --tp, --dp, --topology or --prefill: compare a tiny random model of every family, not MODEL.",
)
@click.option(
    "--prompts", type=click.IntRange(1, 1000), default=8, show_default=True, help="Number of prompts."
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 100_000),
    default=32,
    show_default=True,
    help="Tokens to generate per prompt.",
)
@options.settings(options.ENGINE, ("log_level", "prefill", "decode", "encode", "kv_disk", "kv_disk_dir"))
def verify(
    model_name: str | None,
    reference: str | None,
    against_self: bool,
    topology: str | None,
    families: bool,
    prompts: int,
    tokens: int,
    **given: Any,
) -> int:
    """Compare MODEL's tokens and logits with a reference. Status 1 if they differ, ties excepted.

    Several ranks (--tp, --dp, --ep, --overlap) are compared with one process. A server's groups (--topology
    FILE, or --prefill P --decode D --encode E) are compared with the engine alone, unless --reference is
    given. The counters of the groups must show that caches were handed over, and with encode groups also
    embeddings of images.

    Tokens are compared in float64, and logits in float32 with max|a-b| / max|b| <= 1e-4. Without MODEL, the
    checkpoint of --reference runs.
    """
    if model_name is None and given.get("model") is None and not given.get("config") and topology is None:
        model_name = reference
    # A topology file has its own settings, so flags of an engine are refused in this case.
    if topology is not None:
        from weft.cli.verify.verify_topology import topology_of

        log.configure(given.get("log_level") or "info")
        values = options.given_values(given)
        if given.get("config"):
            raise ConfigError(
                "--config and --topology exclude each other: write all settings in the topology file",
                param="--config",
            )
        good = verify_groups(topology_of(topology, values, model_name), reference, families, prompts, tokens)
    else:
        config = options.build(given, model_name)
        log.configure(config.front.log_level)
        groups = short_form(config)
        if groups is not None:
            good = verify_groups(groups, reference, families, prompts, tokens)
        else:
            check_transfer(config.transfer, config.parallel)
            good = verify_engine(config, reference, against_self, families, prompts, tokens)
    click.echo("verify: passed" if good else "verify: FAILED")
    return 0 if good else 1


def verify_groups(
    topology: Topology, reference: str | None, families: bool, prompts: int, tokens: int
) -> bool:
    """Return True if the groups of ``topology`` give the right tokens.

    Prints the results. Raise ConfigError for options that exclude each other.
    """
    from weft.cli.verify import verify_topology

    if families and reference is not None:
        raise ConfigError(
            "--families compares with the engine alone: leave --reference out", param="--families"
        )
    if families:
        return verify_topology.families(topology, prompts, tokens, click.echo)
    if reference is not None:
        return verify_topology.against_reference(topology, reference, prompts, tokens, click.echo)
    return verify_topology.against_alone(topology, prompts, tokens, click.echo)


def verify_engine(
    config: Config, reference: str | None, against_self: bool, families: bool, prompts: int, tokens: int
) -> bool:
    """Return True if an engine, with one or several ranks, gives the right tokens.

    Prints the results. Raise ConfigError for options that exclude each other, and without a comparison.
    """
    from weft.cli.verify import verify_layout, verify_run

    layout = verify_layout.several(config)
    if families and not layout:
        raise ConfigError(
            "--families compares ranks with one process, or groups with the engine alone: give --tp, --dp, "
            "--topology or --prefill and --decode",
            param="--families",
        )
    if reference is None and not against_self and not layout:
        raise ConfigError(
            "verify needs a comparison: --reference PATH, --self, several ranks (--tp 2, --dp 2) or "
            "groups (--topology FILE, --prefill 1 --decode 1)",
            param="--reference",
        )
    if config.tier.kv_disk is not None and not against_self:
        raise ConfigError("verify compares a disk tier with --self only: add --self", param="--kv-disk")
    if layout and (reference is not None or against_self):
        raise ConfigError(
            "ranks are compared with one process: give --reference and --self without --tp and --dp",
            param="--tp",
        )
    # All requested comparisons run, even after a failure.
    good = True
    if families:
        good = verify_layout.families(config, verify_layout.FAMILIES, prompts, tokens, click.echo)
    elif layout:
        good = verify_layout.against_one_process(config, prompts, tokens, click.echo)
    if reference is not None:
        good = verify_run.against_reference(config, reference, prompts, tokens, click.echo) and good
    if against_self:
        good = verify_run.against_self(config, prompts, tokens, click.echo) and good
    return good
