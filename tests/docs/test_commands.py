"""The commands in the README and in the docs have the options that the command line knows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from weft.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHAIN = {"|", "&&", "||", "&", ";", ">"}
"""Words of a shell that end a command."""


def commands() -> list[tuple[str, str]]:
    """Return (page, command) of each line of code blocks that begins with ``weft``. Drawings do not count."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                command = re.sub(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*", "", line)
                if re.match(r"weft [a-z-]+(\s|$)", command) and not re.search(r"\S {3,}[^ #]", command):
                    found.append((page.name, command))
    return found


def words(command: str) -> list[str]:
    """Return the arguments behind ``weft``, without comments, pipes and further commands."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    found: list[str] = []
    for word in [*lexer][1:]:
        if word in CHAIN or word.startswith((">", "<")):
            break
        found.append(word)
    return found


def test_the_docs_have_commands() -> None:
    assert len(commands()) > 50


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_a_command_is_understood(page: str, command: str) -> None:
    """The command line parses the command. Nothing runs."""
    context = cli.make_context("weft", words(command), resilient_parsing=False)
    while isinstance(context.command, click.Group) and (rest := [*context._protected_args, *context.args]):
        name, sub, rest = context.command.resolve_command(context, rest)
        assert sub is not None, command
        context = sub.make_context(name, rest, parent=context)
