"""Answers of /get_sequence_logprobs/, in the shapes of TRL."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from weft.front.http.answers import Usage, to_json
from weft.front.openai.whole_shape import WholeShape
from weft.front.protocol.npy import base64_pieces
from weft.front.protocol.sequence_request import SequenceFacts
from weft.front.requests.answer_logprobs import bounded
from weft.front.requests.generation import Generation
from weft.text.choice import Choice


class SequenceLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs of the tokens behind each prompt, as JSON."""

    logprobs: list[list[list[float]]]
    """For each sequence and token: candidates by rank. The token itself is one of the candidates."""
    logprob_token_ids: list[list[list[int]]]


class SequenceShape(WholeShape):
    """Answer of one request. Never streamed."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        generation.named("scores-")
        self._facts = msgspec.json.decode(generation.job.facts, type=SequenceFacts)

    def whole(self, usage: Usage) -> Iterator[bytes]:
        """Yield the answer's JSON, about one piece per sequence."""
        yield from self._binary() if self._generation.job.asked.binary else self._json()

    def _json(self) -> Iterator[bytes]:
        ids: list[bytes] = []
        yield b'{"logprobs":['
        for number, length in enumerate(self._facts.lengths):
            named, scores = self._candidates(number, length)
            ids.append(to_json(named))
            yield (b"," if number else b"") + to_json(scores)
        yield b'],"logprob_token_ids":[' + b",".join(ids) + b"]}"

    def _candidates(self, number: int, length: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return (ids, logprobs) of each token of a sequence behind its prompt, by rank."""
        found = _arrays(self._generation.choices[number])
        # The first token of a sequence has no logprob.
        ids, scores = [list[int]()] * (not length), [list[float]()] * (not length)
        for tokens, values, rank in zip(*(part[max(length - 1, 0) :] for part in found), strict=True):
            row = [(int(i), bounded(float(v))) for i, v in zip(tokens[1:], values[1:], strict=True) if i >= 0]
            if rank > len(row):
                row.append((int(tokens[0]), bounded(float(values[0]))))
            ids.append([token for token, _ in row])
            scores.append([score for _, score in row])
        return ids, scores

    def _binary(self) -> Iterator[bytes]:
        """Yield arrays as base64, one piece per sequence: a whole array may be as large as the limit."""
        lengths, prompts, top = self._facts.lengths, self._generation.job.prompts, self._facts.top
        counts = [prompt.count - length for prompt, length in zip(prompts, lengths, strict=True)]
        longest = max(counts)
        likely, own = slice(1, None), slice(0, 1)
        for name, part, columns, width, empty in (
            ("logprobs_b64", 1, likely, top, np.float32(-np.inf)),
            ("token_ids_b64", 0, likely, top, np.int32(0)),
            ("actual_logprobs_b64", 1, own, 1, np.float32(-np.inf)),
            ("actual_token_ids_b64", 0, own, 1, np.int32(0)),
        ):
            yield (b"{" if name == "logprobs_b64" else b",") + to_json(name) + b':"'
            yield from base64_pieces(
                self._padded(number, part, columns, (longest, width), empty) for number in range(len(counts))
            )
            yield b'"'
        rest = {"shape": [len(counts), longest, top], "completion_lengths": counts}
        yield b"," + to_json(rest)[1:]

    def _padded(
        self, number: int, part: int, columns: slice, shape: tuple[int, int], empty: np.generic
    ) -> bytes:
        """Return ``columns`` of ids (``part`` 0) or logprobs (1) of the completion of a sequence, padded at
        the end to ``shape`` with ``empty``. An alternative that does not exist has the id 0."""
        length, prompt = self._facts.lengths[number], self._generation.job.prompts[number]
        found = _arrays(self._generation.choices[number])[part][max(length - 1, 0) :, columns]
        made = np.full(shape, empty)
        end = prompt.count - length
        # The first token of a sequence has no logprob.
        made[end - len(found) : end] = found if part else found.clip(0)
        return made.tobytes()


def _arrays(choice: Choice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (ids, values, rank) of all positions of the prompt from the second token on; see
    ``LogprobColumns.arrays``."""
    found = [] if choice.prompt_logprobs is None else [one.arrays() for one in choice.prompt_logprobs.columns]
    if not found:
        return np.zeros((0, 1), "<i4"), np.zeros((0, 1), "<f4"), np.zeros(0, "<i4")
    ids, values, rank = (np.concatenate(part) for part in zip(*found, strict=True))
    return ids, values, rank
