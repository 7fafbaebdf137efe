"""From prompt ids and sampling parameters to ``Submit`` messages, checked and resolved."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import threading
from collections.abc import Sequence

import msgspec
import numpy as np

from weft.common.errors import ContextLength, InvalidRequest
from weft.kv.hashing import salted_media
from weft.text.tokenizer import Tokenizer
from weft.types.grammar import Grammar
from weft.types.media_item import MediaItem
from weft.types.messages import Pooling, Submit
from weft.types.routes import Routes, RouteShape, check_routes
from weft.types.sampling import (
    ALL_LOGPROBS,
    MAX_BAD_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_TOP_LOGPROBS,
    SEED_MASK,
    SamplingParams,
    TokenParams,
)


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a model for requests."""

    vocab_size: int
    """Number of usable ids: prompts, samples and biases use smaller ids only."""
    max_model_len: int
    """Maximum tokens of prompt and output together."""
    end_ids: tuple[int, ...]
    """Ids that end a sequence unless ``ignore_eos``."""
    max_logprobs: int = MAX_TOP_LOGPROBS
    """Largest ``logprobs`` and ``prompt_logprobs``; -1 for the whole vocabulary."""
    routes: RouteShape | None = None
    """Size of the model's routes; None without routed experts."""
    defaults: dict[str, int | float] = {}
    """Sampling parameters of a server's requests without their own values: see ``sampling_defaults``."""


class IdMint:
    """Makes random ids of sequences and requests, distinct from all live ids. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[int] = set()

    def mint(self) -> int:
        """Return a new random 64-bit id. The id stays live until ``release``."""
        with self._lock:
            while (made := secrets.randbits(64)) in self._live:
                pass
            self._live.add(made)
        return made

    def release(self, made: int) -> None:
        """Free an id. Unknown ids are ignored."""
        with self._lock:
            self._live.discard(made)


class SeedMint:
    """Makes the seed of a request without a seed: random, or a pure function of (seed, request number).

    Thread-safe. Call ``mint`` at the arrival of each request, so that numbers follow the order of arrival.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._numbers = itertools.count()

    def mint(self) -> int:
        """Return the seed of the next request. Call for every request: requests with an own seed are numbered
        too.
        """
        number = next(self._numbers)
        return secrets.randbits(64) if self._seed is None else minted_seed(self._seed, number)


def minted_seed(seed: int, number: int) -> int:
    """Return the seed of request ``number`` under ``--seed seed``."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def build_submits(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    limits: ModelLimits,
    tokenizer: Tokenizer,
    *,
    ids: IdMint,
    seed: int,
    prompt_param: str = "prompt",
) -> list[Submit]:
    """Return one Submit per choice (``n``) of one prompt; see ``submits_of``.

    Raises InvalidRequest or ContextLength with the parameter's name. No id is made before an error.
    """
    data = prompt_bytes(prompt_ids, limits, prompt_param)
    token_params = msgspec.structs.replace(
        resolve_params(params, limits, tokenizer),
        max_tokens=max_tokens_for(len(prompt_ids), params, limits, prompt_param),
    )
    check_routed(params, len(prompt_ids), limits)
    seed = seed if params.seed is None else params.seed & SEED_MASK
    return submits_of(
        data,
        token_params,
        params.n,
        ids=ids,
        seed=seed,
        routes=first_route(params),
        forced=params.force_routed_experts,
    )


def first_route(params: SamplingParams) -> int:
    """Return ``Submit.routes`` of a request."""
    return params.routed_experts_prompt_start if params.return_routed_experts else -1


def check_routed(params: SamplingParams, num_prompt: int, limits: ModelLimits) -> None:
    """Raise InvalidRequest if the model cannot report or force the routes of a request."""
    start, forced = first_route(params), params.force_routed_experts
    check_routes(start, forced, num_prompt, limits.routes, limits.max_model_len)


def submits_of(
    prompt: bytes,
    params: TokenParams,
    n: int,
    *,
    ids: IdMint,
    seed: int,
    priority: int = 0,
    salt: str = "",
    owner: int = 0,
    client: int = 0,
    grammar: Grammar | None = None,
    pooling: Pooling = "",
    explain: bool = False,
    session: str = "",
    media: tuple[MediaItem, ...] = (),
    adapter: str = "",
    payer: str = "",
    routes: int = -1,
    forced: Routes | None = None,
) -> list[Submit]:
    """Return one Submit per choice, in order.

    All share ``request``, the seed and the bytes of the prompt.

    ``prompt`` is int32, little-endian. ``params`` must be complete: nothing is checked or resolved here. See
    ``Submit`` for ``owner``, ``client``, ``grammar``, ``pooling``, ``session``, ``media``, ``adapter``,
    ``payer``, ``routes`` and ``forced``.
    ``explain`` and prompt logprobs apply to the first choice only. All ids are minted here; the caller
    releases the ids.
    """
    if forced is not None:  # other experts make other caches
        salt = f"{salt}/{hashlib.blake2b(forced.ids, digest_size=16).hexdigest()}"
    first = Submit(
        sequence=ids.mint(),
        request=ids.mint(),
        seed=seed,
        prompt_ids=prompt,
        params=params,
        priority=priority,
        salt=salt,
        owner=owner,
        client=client,
        grammar=grammar,
        pooling=pooling,
        session=session,
        media=salted_media(media, salt),
        adapter=adapter,
        payer=payer,
        routes=routes,
        forced=forced,
    )
    # Only choice 0 computes prompt logprobs: the parallel samples share the prompt.
    parallel_sample = msgspec.structs.replace(params, prompt_logprobs=-1)
    others = [
        msgspec.structs.replace(first, sequence=ids.mint(), choice=choice, params=parallel_sample)
        for choice in range(1, n)
    ]
    return [msgspec.structs.replace(first, explain=True) if explain else first, *others]


def prompt_bytes(prompt_ids: Sequence[int], limits: ModelLimits, param: str = "prompt") -> bytes:
    """Return the ids as int32, little-endian, for a Submit.

    Raises InvalidRequest with ``param`` for an empty prompt and for ids outside the vocabulary.
    """
    if not prompt_ids:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    wrong = f"{param} must hold token ids from 0 to {limits.vocab_size - 1}"
    if any(type(token) is not int for token in prompt_ids):
        raise InvalidRequest(wrong, param=param)
    try:
        # int64 first, so that the range check cannot overflow.
        ids = np.array(prompt_ids, "<i8")
    except OverflowError:
        raise InvalidRequest(wrong, param=param) from None
    if ids.min() < 0 or ids.max() >= limits.vocab_size:
        raise InvalidRequest(wrong, param=param)
    return ids.astype("<i4").tobytes()


def resolve_params(params: SamplingParams, limits: ModelLimits, tokenizer: Tokenizer) -> TokenParams:
    """Return the parameters in token ids, once per request. ``max_tokens`` depends on the prompt and stays 1
    here.

    Raises InvalidRequest for ids outside the vocabulary, for bad words with too many tokens, and for
    combinations without any samplable token.
    """
    _check_vocab("stop_token_ids", params.stop_token_ids, limits)
    _check_vocab("logit_bias", tuple(params.logit_bias or ()), limits)
    _check_vocab("allowed_token_ids", params.allowed_token_ids or (), limits)
    bad = bad_word_ids(params.bad_words, tokenizer)
    for word in bad:
        _check_vocab("bad_words", word, limits)
    ends = () if params.ignore_eos else tuple(token for token in limits.end_ids if token < limits.vocab_size)
    stop_ids = tuple(sorted({*ends, *params.stop_token_ids}))
    allowed = None if params.allowed_token_ids is None else tuple(sorted(set(params.allowed_token_ids)))
    _check_any_left(params, allowed, bad, stop_ids)
    # top_p = 0 means greedy: top_k 1 keeps only the most likely token.
    return TokenParams(
        temperature=float(params.temperature),
        top_k=max(params.top_k, 0) if params.top_p else 1,
        top_p=float(params.top_p) or 1.0,  # 0 is not a valid top_p for the sampler: see top_k
        min_p=float(params.min_p),
        frequency_penalty=float(params.frequency_penalty),
        presence_penalty=float(params.presence_penalty),
        repetition_penalty=float(params.repetition_penalty),
        logit_bias=tuple(sorted((token, float(bias)) for token, bias in (params.logit_bias or {}).items())),
        allowed=allowed,
        bad=bad,
        min_tokens=params.min_tokens,
        stop_ids=stop_ids,
        logprobs=_logprobs("logprobs", params.logprobs, limits),
        prompt_logprobs=_logprobs("prompt_logprobs", params.prompt_logprobs, limits),
    )


def _logprobs(name: str, wanted: int | None, limits: ModelLimits) -> int:
    """Return the field ``name`` of TokenParams. Raises InvalidRequest above the server's limit."""
    if wanted is None:
        return -1
    most = limits.max_logprobs
    if most >= 0 and not 0 <= wanted <= most:
        raise InvalidRequest(
            f"{name} must be 0 to {most} on this server (--max-logprobs; -1 allows the whole vocabulary)",
            param=name,
        )
    return ALL_LOGPROBS if wanted < 0 else wanted


def max_tokens_for(
    num_prompt: int, params: SamplingParams, limits: ModelLimits, prompt_param: str = "prompt"
) -> int:
    """Return the maximum output tokens for a prompt of ``num_prompt`` tokens.

    Raises ContextLength if prompt and output do not fit, and InvalidRequest if ``min_tokens`` does not fit.
    """
    room = limits.max_model_len - num_prompt
    if room < 1:
        raise ContextLength(
            f"the model's context is {limits.max_model_len} tokens, but the prompt alone has {num_prompt} "
            "and the output needs at least one; shorten the prompt",
            param=prompt_param,
        )
    if params.max_tokens is not None and params.max_tokens > room:
        raise ContextLength(
            f"the model's context is {limits.max_model_len} tokens, but {num_prompt + params.max_tokens} "
            f"were requested: {num_prompt} in the prompt, {params.max_tokens} for the output; shorten either",
            param="max_tokens",
        )
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, but the output has at most {max_tokens} tokens",
            param="min_tokens",
        )
    return max_tokens


def _check_vocab(name: str, tokens: Sequence[int], limits: ModelLimits) -> None:
    if any(not 0 <= token < limits.vocab_size for token in tokens):
        raise InvalidRequest(f"{name} must hold token ids from 0 to {limits.vocab_size - 1}", param=name)


def _check_any_left(
    params: SamplingParams,
    allowed: tuple[int, ...] | None,
    bad: tuple[tuple[int, ...], ...],
    stop_ids: tuple[int, ...],
) -> None:
    """Raise InvalidRequest unless at least one allowed token can be sampled at every position."""
    if allowed is None:
        return
    banned = {word[0] for word in bad if len(word) == 1}
    if banned.issuperset(allowed):
        raise InvalidRequest(
            "bad_words forbids all tokens of allowed_token_ids; change one of the two", param="bad_words"
        )
    if params.min_tokens and banned.union(stop_ids).issuperset(allowed):
        raise InvalidRequest(
            "with min_tokens, allowed_token_ids needs a token that does not end the sequence",
            param="min_tokens",
        )


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of each word, at the start of a text and behind a space.

    Raises InvalidRequest for too many tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    total = 0
    for word in words:
        # Tokenizers encode a word differently at the start of a text and behind a space.
        for text in (word, " " + word.lstrip(" ")):
            try:
                ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            except InvalidRequest as error:
                raise InvalidRequest(error.message, param="bad_words") from None
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(
                    f"each word of bad_words must have at most {MAX_BAD_WORD_TOKENS} tokens",
                    param="bad_words",
                )
            total += len(ids)
            if total > MAX_BAD_TOKENS:
                raise InvalidRequest(
                    f"bad_words have more than {MAX_BAD_TOKENS} tokens, each word counted with and without a "
                    "space before it; send fewer or shorter words",
                    param="bad_words",
                )
            if ids:
                found[ids] = None
    return tuple(found)
