"""Scripts of a scripted engine process: a file of entries. Each entry is an output, played to matching
prompts.

``docs/scripted.md`` documents the form. A file is read once, when an engine process starts. Every error in
the file is a ConfigError with the entry and the line.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import yaml
from msgspec import Meta

from weft.common.errors import ConfigError, InvalidRequest, Overloaded, RowError, Unavailable, WeftError
from weft.config.file import load_yaml, unreadable
from weft.text.tokenizer import Tokenizer

Finish: TypeAlias = Literal["stop", "length", "error"]
Failure: TypeAlias = Literal["failed", "overloaded", "unavailable"]
_Chunk = Annotated[int, Meta(ge=1, le=1 << 20)]
_Chunks = Annotated[list[_Chunk], Meta(min_length=1)]
_Millis = Annotated[float, Meta(ge=0, le=3.6e6)]


class _ScriptFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The output fields of an entry and of each choice. None inherits from the entry, then the default."""

    text: str | None = None
    token_ids: list[int] | None = None
    finish: Finish | None = None
    error: Failure | None = None
    chunks: _Chunk | _Chunks | None = None
    delay_ms: _Millis | None = None
    wait_ms: _Millis | None = None
    beat_ms: _Millis | None = None


class _Match(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    contains: str | list[str] | None = None
    regex: str | None = None
    request: Annotated[int, Meta(ge=1)] | None = None


class _ScriptEntry(_ScriptFields, frozen=True, kw_only=True):
    match: str | _Match | None = None
    repeat: bool | Annotated[int, Meta(ge=1)] = 1
    num_cached: Annotated[int, Meta(ge=0)] = 0
    choices: Annotated[list[_ScriptFields], Meta(min_length=1)] | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """The output of one choice."""

    ids: tuple[int, ...]
    finish: Finish
    error: WeftError | None
    """Error of the output if ``finish`` is "error"; else None."""
    chunks: tuple[int, ...]
    """Tokens of each event; the last number applies to all further events."""
    delay: float
    """Seconds per token."""
    wait: float
    """Seconds before the first event."""
    beat: float = 0.0
    """Events leave at multiples of these seconds, as those of one step; 0: at any time."""

    def chunk(self, number: int) -> int:
        """Return the tokens of event ``number``, counted from 0."""
        return self.chunks[min(number, len(self.chunks) - 1)]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry: the condition on prompts, and the outputs."""

    contains: tuple[str, ...]
    regex: re.Pattern[str] | None
    request: int | None
    """Number of the prompt on the engine process, counted from 1; None matches any prompt."""
    times: int | None
    """Maximum prompts answered by the entry; None: unlimited."""
    num_cached: int
    outputs: tuple[Output, ...]

    @property
    def reads(self) -> bool:
        """True if the condition needs the prompt's text."""
        return bool(self.contains) or self.regex is not None

    def matches(self, prompt: str, number: int) -> bool:
        """Return True if the prompt matches. ``prompt``: the text with special tokens, unused unless
        ``reads``. ``number``: the number of the prompt on the engine process.
        """
        if self.request is not None and self.request != number:
            return False
        if not all(part in prompt for part in self.contains):
            return False
        return self.regex is None or self.regex.search(prompt) is not None

    def output(self, choice: int) -> Output:
        """Return the output of a choice. Choices beyond the last output start again at the first output."""
        return self.outputs[choice % len(self.outputs)]


def read_script(path: str | Path, tokenizer: Tokenizer, vocab_size: int) -> tuple[Entry, ...]:
    """Return the entries of a YAML file, or of a ``.jsonl`` file with one JSON object per line.

    Raises ConfigError with the file, the entry and the line.
    """
    name = f"--scripted {Path(path).name}"
    made = []
    for number, (line, data) in enumerate(_load(Path(path), name), 1):
        where = f"{name}, entry {number} (line {line})"
        try:
            entry = msgspec.convert(data, _ScriptEntry)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {error}", param="--scripted") from None
        made.append(_Maker(where, tokenizer, vocab_size).entry(entry))
    if not made:
        raise ConfigError(f"{name} has no entry: give a list of them", param="--scripted")
    return tuple(made)


def _load(path: Path, name: str) -> list[tuple[int, Any]]:
    """Return (line number, raw entry) for each entry of the file.

    Raises ConfigError for a file that is unreadable or no list.
    """
    if path.suffix == ".jsonl":
        return _json_lines(path, name)
    loaded = load_yaml(path, name, "--scripted")
    if loaded is None:
        return []
    if not isinstance(loaded, list):
        raise ConfigError(
            f"{name} must be a list of entries, e.g. - text: hello (a *.jsonl file has one entry per line)",
            param="--scripted",
        )
    # The values are loaded already. Parse again for the line number of each entry.
    root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.SequenceNode)
    nodes = root.value
    return [(node.start_mark.line + 1, entry) for node, entry in zip(nodes, loaded, strict=True)]


def _json_lines(path: Path, name: str) -> list[tuple[int, Any]]:
    """Return (line number, value) for each non-empty line. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(path, name, "--scripted", error) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not UTF-8 text", param="--scripted") from None
    found = []
    # Not splitlines: JSON strings may contain other line separators.
    for line, content in enumerate(text.split("\n"), 1):
        if content.strip():
            try:
                found.append((line, json.loads(content)))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{name}, line {line}: not JSON ({error})", param="--scripted") from None
    return found


class _Maker:
    """Makes one entry from the data of the file."""

    def __init__(self, where: str, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._where = where
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def entry(self, data: _ScriptEntry) -> Entry:
        """Return the entry for ``data``. Raises ConfigError for contradicting or invalid fields."""
        match = _Match(contains=data.match) if isinstance(data.match, str) else data.match or _Match()
        contains = [match.contains] if isinstance(match.contains, str) else match.contains or []
        if not all(contains):
            raise self._wrong("match must not be empty text: leave it out to match every prompt")
        try:
            regex = None if match.regex is None else re.compile(match.regex, re.DOTALL)
        except re.error as error:
            raise self._wrong(f"match.regex is not a valid regular expression ({error})") from None
        if data.repeat is False:
            raise self._wrong("repeat must be a number of at least 1, or true for any number")
        # A choice without text takes no text from the entry, so text beside choices would have no effect.
        if data.choices is not None and (data.text is not None or data.token_ids is not None):
            raise self._wrong("with choices, text or token_ids belong in each choice")
        return Entry(
            contains=tuple(contains),
            regex=regex,
            request=match.request,
            times=None if data.repeat is True else int(data.repeat),
            num_cached=data.num_cached,
            outputs=tuple(self._output(one, data) for one in data.choices or [data]),
        )

    def _output(self, data: _ScriptFields, entry: _ScriptEntry) -> Output:
        """Return the output of one choice, ``data``.

        Unset fields come from ``entry``, then from the defaults.

        Milliseconds become seconds. Raises ConfigError.
        """

        def field(name: str, default: Any) -> Any:
            # A choice's own value wins over the entry's value.
            own = getattr(data, name)
            value = getattr(entry, name) if own is None else own
            return default if value is None else value

        error = field("error", None)
        finish = field("finish", "stop" if error is None else "error")
        if error is not None and finish != "error":
            raise self._wrong(f"error and finish: {finish} contradict each other: leave one out")
        chunks = field("chunks", 1)
        return Output(
            ids=self._ids(data, finish),
            finish=finish,
            error=_error(error or "failed") if finish == "error" else None,
            chunks=(chunks,) if isinstance(chunks, int) else tuple(chunks),
            delay=field("delay_ms", 0.0) / 1e3,
            wait=field("wait_ms", 0.0) / 1e3,
            beat=field("beat_ms", 0.0) / 1e3,
        )

    def _ids(self, data: _ScriptFields, finish: Finish) -> tuple[int, ...]:
        """Return the token ids of a choice: its ``token_ids``, or its encoded ``text``.

        Empty only for an error without text.

        Raises ConfigError unless exactly one of both is given, and for a text that the tokens cannot spell.
        """
        if (data.text is None) == (data.token_ids is None):
            if data.text is None and finish == "error":
                return ()
            raise self._wrong("give either text or token_ids")
        if data.token_ids is not None:
            wrong = [one for one in data.token_ids if not 0 <= one < self._vocab_size]
            if wrong:
                most = self._vocab_size - 1
                raise self._wrong(f"token_ids has {wrong[0]}; the vocabulary is 0 to {most}")
            return tuple(data.token_ids)
        assert data.text is not None
        try:
            ids = self._tokenizer.encode(data.text, add_special_tokens=False, parse_special=True)
        except InvalidRequest as error:
            raise self._wrong(f"text: {error.message}") from None
        # Tokenizers can normalize text. Encode and decode again to be sure of playing exactly this text.
        again = self._tokenizer.decode(ids, skip_special_tokens=False)
        if again != data.text:
            at = next((i for i, (a, b) in enumerate(zip(again, data.text, strict=False)) if a != b), -1)
            at = min(len(again), len(data.text)) if at < 0 else at
            raise self._wrong(
                f"the model's tokens cannot spell the text: it differs at character {at}; give token_ids"
            )
        return tuple(ids)

    def _wrong(self, message: str) -> ConfigError:
        return ConfigError(f"{self._where}: {message}", param="--scripted")


def _error(kind: Failure) -> WeftError:
    """Return the error that a script's ``error`` stands for."""
    if kind == "overloaded":
        return Overloaded("the script says that the queue is full")
    if kind == "unavailable":
        return Unavailable("the script says that the engine cannot take the request")
    return RowError("the script ends this output with an error", code="script_error")
