"""``weft verify``: proof that this machine, this model and these settings give the right tokens."""

from __future__ import annotations

from typing import Any

import click

from weft.common import log
from weft.common.errors import ConfigError
from weft.launch import options


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
    help="Compare each prompt alone with batched, chunked, preempted, two steps in flight.",
)
@click.option(
    "--families",
    is_flag=True,
    help="With --tp, --dp: compare for a tiny random model of every family, and not for MODEL.",
)
@click.option(
    "--prompts", type=click.IntRange(1, 1000), default=8, show_default=True, help="Prompts to compare."
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 100_000),
    default=32,
    show_default=True,
    help="Tokens to generate for each.",
)
@options.settings(options.ENGINE, ("log_level",))
def verify(
    model_name: str | None,
    reference: str | None,
    against_self: bool,
    families: bool,
    prompts: int,
    tokens: int,
    **given: Any,
) -> int:
    """Compare MODEL's tokens and logits with a reference. Status 1 if they differ, ties excepted.

    With several ranks (--tp, --dp, --ep, --overlap) their tokens are compared with those of one process.

    Tokens are compared greedily in float64, logits at max|a-b| / max|b| <= 1e-4 in float32. Without MODEL the
    checkpoint of --reference is run.
    """
    if model_name is None and given.get("model") is None and not given.get("config"):
        model_name = reference
    config = options.build(given, model_name)
    log.configure(config.front.log_level)

    from weft.launch import verify_layout, verify_run

    layout = verify_layout.several(config)
    if reference is None and not against_self and not layout:
        raise ConfigError(
            "say what to compare with: --reference PATH, --self, or several ranks (--tp 2, --dp 2)",
            param="--reference",
        )
    if layout and (reference is not None or against_self):
        raise ConfigError(
            "ranks are compared with one process: give --reference and --self without --tp and --dp",
            param="--tp",
        )
    if families and not layout:
        raise ConfigError("--families compares ranks with one process: give --tp or --dp", param="--families")
    good = True
    if families:
        good = verify_layout.families(config, verify_layout.FAMILIES, prompts, tokens, click.echo)
    elif layout:
        good = verify_layout.against_one_process(config, prompts, tokens, click.echo)
    if reference is not None:
        good = verify_run.against_reference(config, reference, prompts, tokens, click.echo) and good
    if against_self:
        good = verify_run.against_self(config, prompts, tokens, click.echo) and good
    click.echo("verify: passed" if good else "verify: FAILED")
    return 0 if good else 1
