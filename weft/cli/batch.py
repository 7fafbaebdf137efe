"""``weft batch``: files of requests, answered offline or by a running server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import click

from weft.cli.client_cert import client_cert, client_cert_option
from weft.common.client_tls import check_url, client_options, key_headers, versioned_url
from weft.common.errors import ConfigError
from weft.config.flags import SETTINGS

if TYPE_CHECKING:
    from weft.batch.lines import BatchAnswer
    from weft.batch.offline import OfflineStore, RecordLog
    from weft.batch.runner import LineRequest

SILENCE_S = 60.0
"""Seconds without an answer of the server after which the command ends."""
LONGEST_ANSWER_S = 7200.0
"""Seconds without a byte of an answer after which a connection counts as lost."""
MOST_SHOWN = 10
"""Maximum number of printed errors of an input file."""


@click.group()
def batch() -> None:
    """Answer files of requests, in the form of OpenAI's Batch API."""


@batch.command()
@click.argument("source", metavar="INPUT", type=click.Path())
@click.argument("target", metavar="OUTPUT", type=click.Path())
@click.argument("words", metavar="[MODEL] [-- FLAGS OF WEFT SERVE]", nargs=-1)
@click.option("--url", help="URL of a running server. Default: start a server for MODEL.")
@click.option("--api-key", help="API key of the server. Prefer the environment variable WEFT_API_KEY.")
@client_cert_option
@click.option("--errors", type=click.Path(), help="File for failed lines. Default: OUTPUT has all lines.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 4096),
    default=64,
    show_default=True,
    help="Maximum number of lines at once.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, (1 << 63) - 1),
    default=0,
    show_default=True,
    help="Seed of the batch. A line without a seed gets one from this number and the custom_id.",
)
def run(
    source: str,
    target: str,
    words: tuple[str, ...],
    url: str | None,
    api_key: str | None,
    errors: str | None,
    concurrency: int,
    seed: int,
) -> int:
    """Answer each line of INPUT and write the answers to OUTPUT.

    INPUT has one JSON object per line: custom_id, method, url and body. Lines whose custom_id is in OUTPUT or
    in --errors are done, so an interrupted command continues with the same words. The exit status is 1 if a
    line failed.
    """
    if url is not None and words:
        raise ConfigError("MODEL starts a server, and --url names a running server: give one of them")
    files = [Path(name).absolute() for name in (source, target, errors) if name is not None]
    if len(set(files)) < len(files):
        raise ConfigError("INPUT, OUTPUT and --errors must be different files")
    from weft.batch.offline import RecordLog
    from weft.cli.chat.chat_command import key_for
    from weft.cli.chat.chat_server import OwnServer

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_open_source(source))
        # Before the start of a server: a wrong file costs no load of a model.
        output = RecordLog(Path(target))
        stack.callback(output.close)
        failed = None if errors is None else RecordLog(Path(errors))
        if failed is not None:
            stack.callback(failed.close)
        if url is None:
            model, flags = words[0] if words else SETTINGS["model"].default, words[1:]
            own = stack.enter_context(OwnServer(model, flags, api_key or ""))
            click.echo(f"starting a server for {model} ...", err=True)
            url = own.url()
        client = _Client(url, api_key or key_for(url))
        return asyncio.run(_run(client, file, output, failed, concurrency, seed))


def _open_source(source: str) -> BinaryIO:
    """Return the open input file. Lines are read again when the lines run, so a pipe is copied to a temporary
    file first. Raise ConfigError."""
    try:
        file = os.fdopen(os.open(source, os.O_RDONLY | os.O_CLOEXEC), "rb")
        if file.seekable():
            return file
        with file:
            copy = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115
            shutil.copyfileobj(file, copy)
            copy.seek(0)
            return copy
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from None


async def _run(
    client: _Client,
    file: BinaryIO,
    output: RecordLog,
    failed: RecordLog | None,
    concurrency: int,
    seed: int,
) -> int:
    """Run all pending lines. Return the exit status."""
    from weft.batch.book import BatchBook, OpenBatch
    from weft.batch.lines import Checks
    from weft.batch.offline import OFFLINE, OfflineStore
    from weft.batch.runner import BatchRunner
    from weft.common.progress import progress_bar

    counts = {True: 0, False: 0}
    async with client.opened(concurrency):
        models = await client.models()
        checks = Checks(None, models.__contains__, models[0], most_lines=1 << 31)

        def done(good: bool) -> None:
            counts[good] += 1
            bar.update()

        store = OfflineStore(file, checks, output, failed, seed, done)
        _report(store)
        with progress_bar(total=store.finished + len(store.pending), title="batch", unit="line") as bar:
            bar.update(store.finished)
            book = BatchBook()
            runner = BatchRunner(book, store, client.send, lambda model, mine: concurrency - book.running)
            runner.feed(OpenBatch(batch=OFFLINE, lines=store.pending))
            await runner.run(lambda: runner.idle)
    text = f"{counts[True]} lines answered, {counts[False]} failed, {store.finished} from an earlier run"
    click.echo(f"batch: {text}", err=True)
    return 1 if counts[False] else 0


def _report(store: OfflineStore) -> None:
    """Raise ConfigError with the first errors of the input file, if it has any."""
    from weft.batch.offline import problem_text

    if store.problems:
        shown = [problem_text(error) for error in store.problems[:MOST_SHOWN]]
        more = len(store.problems) - len(shown)
        rest = [f"and {more} more"] if more else []
        raise ConfigError("the input file has errors; no line ran:\n  " + "\n  ".join([*shown, *rest]))


class _Client:
    """Connection to the server."""

    def __init__(self, url: str, key: str) -> None:
        base = versioned_url(url)
        check_url(base)
        self._base = base.removesuffix("/v1")
        self._headers = key_headers(key)
        self._down: float | None = None
        """Time of the first lost connection since the last answer."""
        self._shown = time.monotonic()
        """Time of the last answer, or of the last note about refused lines."""

    @contextlib.asynccontextmanager
    async def opened(self, concurrency: int) -> AsyncIterator[None]:
        """Hold the connections inside the context."""
        import httpx

        limits = httpx.Limits(max_connections=concurrency + 1, max_keepalive_connections=concurrency + 1)
        timeout = httpx.Timeout(LONGEST_ANSWER_S, connect=10.0, pool=None)
        options = client_options(self._base, client_cert())
        async with httpx.AsyncClient(
            base_url=self._base, headers=self._headers, limits=limits, timeout=timeout, **options
        ) as self._http:
            yield

    async def models(self) -> Sequence[str]:
        """Return the names of the served models. Raise ConfigError without a valid answer."""
        import httpx

        try:
            answer = await self._http.get("/v1/models", timeout=SILENCE_S)
        except httpx.HTTPError as error:
            raise ConfigError(f"--url: no answer from the server ({type(error).__name__})") from None
        if answer.status_code != 200:
            raise ConfigError(f"the server answered {answer.status_code}: {answer.text[:300]}")
        try:
            names = [str(one["id"]) for one in answer.json()["data"]]
        except (ValueError, TypeError, KeyError):
            raise ConfigError("--url: the server is not OpenAI-compatible: /v1/models has no list") from None
        if not names:
            raise ConfigError("--url: the server lists no model")
        return names

    async def send(self, request: LineRequest) -> BatchAnswer:
        """Send a line and return the answer. Raise LineLost for a lost connection, and ConfigError if the
        server has not answered any line for ``SILENCE_S`` seconds."""
        import httpx

        from weft.batch.lines import BatchAnswer
        from weft.batch.offline import compact
        from weft.batch.runner import LineLost

        headers = {"content-type": "application/json"}
        try:
            answer = await self._http.post(request.url, content=request.body, headers=headers)
        except httpx.TransportError as error:
            self._down = self._down or time.monotonic()
            if time.monotonic() - self._down > SILENCE_S:
                raise ConfigError(
                    f"the server does not answer ({type(error).__name__}); run the command again to continue"
                ) from None
            raise LineLost from None
        self._down = None
        self._note(answer.status_code, answer.content[:300])
        if answer.status_code in (401, 403):
            raise ConfigError(f"the server answered {answer.status_code}: {answer.text[:300]}")
        return BatchAnswer(
            answer.status_code, answer.headers.get("x-request-id", ""), compact(answer.content)
        )

    def _note(self, status: int, body: bytes) -> None:
        """Print a refusal for lack of room after each ``SILENCE_S`` seconds without another answer."""
        from weft.batch.book import NO_CAPACITY

        now = time.monotonic()
        if status in NO_CAPACITY:
            if now - self._shown < SILENCE_S:
                return
            text = body.decode("utf-8", "replace")
            click.echo(f"batch: lines wait: the server answers {status}: {text}", err=True)
        self._shown = now
