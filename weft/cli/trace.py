"""``weft trace``: one Perfetto file from the files that a server's processes wrote with --trace-requests."""

from __future__ import annotations

import json
from pathlib import Path

import click

from weft.common.errors import ConfigError
from weft.common.folder import open_private
from weft.tracing.merge_traces import chrome_trace, read_folder, read_steps
from weft.tracing.slowest import rows, table


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="File to write. Default: FOLDER/trace.perfetto.json."
)
@click.option(
    "--slowest",
    default=10,
    show_default=True,
    type=click.IntRange(0),
    help="Number of requests in the table.",
)
def trace(folder: Path, out: Path | None, slowest: int) -> None:
    """Merge the files of `weft serve --trace-requests FOLDER`, for https://ui.perfetto.dev or
    chrome://tracing.

    The file has a process for each process of Weft, a track for each request, and arrows from the API server
    to the engines. Step traces (`--trace FOLDER/steps.json`) are included. A table then shows the slowest
    requests and their time by stage: read (and tokenize), images (until embeddings from other groups arrive),
    queue, prefill, transfer (the part after the first token), slot (the wait for a slot at the decode group),
    decode.
    """
    spans, bad = read_folder(folder)
    if bad:
        click.echo(f"{bad} incomplete lines are ignored", err=True)
    out = out or folder / "trace.perfetto.json"
    try:
        with open_private(out, "w") as file:
            file.write(json.dumps(chrome_trace(spans, read_steps(folder))))
    except OSError as error:
        raise ConfigError(f"--out: cannot write that file ({error.strerror})", param="--out") from None
    found = rows(spans)
    processes = len({(span.process, span.pid) for span in spans})
    click.echo(f"{out}: {len(found)} requests, {len(spans)} spans of {processes} processes")
    if found[:slowest]:
        click.echo(table(found[:slowest]))
