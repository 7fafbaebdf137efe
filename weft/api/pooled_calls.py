"""Calls of ``LLM`` without output tokens: embeddings, scores and classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from weft.api.request import Request, RequestMaker
from weft.api.request_outputs import ClassOutput, EmbeddingOutput, ScoreOutput
from weft.common.errors import InvalidRequest
from weft.config.resolved import EngineConfig
from weft.text.scoring import Prompts, Tasks, check_dimensions, cosine, probabilities, shown
from weft.types.messages import Pooling
from weft.types.sampling import SamplingParams

Pool = Literal["auto", "last", "mean", "cls"]
Loras: TypeAlias = str | Sequence[str | None] | None
"""Name of an adapter for all prompts, or a name or None for each prompt."""


class PooledCalls:
    """Part of ``LLM``: calls that end with the prompt."""

    config: EngineConfig
    _maker: RequestMaker
    _run: Callable[..., list[Request]]

    def embed(
        self,
        prompts: Any,
        *,
        pooling: Pool = "auto",
        normalize: bool | None = None,
        dimensions: int | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
        lora: Loras = None,
    ) -> list[EmbeddingOutput]:
        """Return one vector per prompt, made from the final hidden states: the last state, the mean of all
        states, or the first state (cls). auto: as the checkpoint says, else the last state.

        ``prompts``, ``priority`` and ``lora``: see ``generate``. Vectors have length 1, unless ``normalize``
        is False, or is None and the checkpoint says otherwise. ``dimensions``: length of the vectors, if the
        checkpoint allows shorter vectors. Raise the errors of ``generate``. If only one prompt fails, its
        output has ``error``.
        """
        if pooling not in ("auto", "last", "mean", "cls"):
            raise InvalidRequest('pooling must be "auto", "last", "mean" or "cls"', param="pooling")
        tasks = self._embeds(pooling)
        check_dimensions(dimensions, tasks.pooled, tasks.hidden)
        many = list(prompts) if isinstance(prompts, list | tuple) else [prompts]
        scale = tasks.pooled.normalize if normalize is None else normalize
        made = self._pool(many, tasks.pooled.mode, priority, use_tqdm, lora)
        return [
            EmbeddingOutput(
                request_id=request.request_id,
                prompt=request.prompt,
                prompt_token_ids=list(request.prompt_ids),
                embedding=shown(request.choices[0].embedding, dimensions, scale),
                num_cached_tokens=request.choices[0].num_cached,
                error=request.choices[0].error,
            )
            for request in made
        ]

    def classify(
        self,
        prompts: Any,
        *,
        use_activation: bool = True,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
        lora: Loras = None,
    ) -> list[ClassOutput]:
        """Return one value per label for each prompt: probabilities, unless ``use_activation`` is False or
        the checkpoint is a regression.

        Raise InvalidRequest for a model without classes, and the errors of ``embed``.
        """
        spec = self.config.spec.classify
        if spec is None:
            raise InvalidRequest(
                "this model has no classes: load a checkpoint for sequence classification, or name tokens "
                "with hf_overrides (classifier_from_token)",
                param="model",
            )
        many = list(prompts) if isinstance(prompts, list | tuple) else [prompts]
        made = self._pool(many, "classify", priority, use_tqdm, lora)
        outputs = []
        for request in made:
            choice = request.choices[0]
            numbers = np.frombuffer(choice.embedding, "<f4")
            probs = probabilities(numbers, spec, use_activation) if choice.error is None else numbers
            label = spec.names[int(probs.argmax())] if len(probs) else ""
            outputs.append(
                ClassOutput(
                    request_id=request.request_id,
                    prompt_token_ids=list(request.prompt_ids),
                    probs=np.asarray(probs, np.float64),
                    label=label,
                    num_cached_tokens=choice.num_cached,
                    error=choice.error,
                )
            )
        return outputs

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_activation: bool = True,
        use_tqdm: bool = True,
    ) -> list[ScoreOutput]:
        """Return the score of each pair of a query and a document. One query goes with every document.

        A classifier with one label reads each pair as one prompt. Otherwise the score is the cosine of two
        embeddings. ``instruction``: for a model with an instruction in its prompt form. Raise InvalidRequest,
        and the errors of ``embed``.
        """
        first, second = _texts(queries, "queries"), _texts(documents, "documents")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second) or not first:
            raise InvalidRequest(
                f"there are {len(first)} queries and {len(second)} documents: send one query, or one query "
                "for each document",
                param="documents",
            )
        spec = self.config.spec.classify
        prompts = Prompts(self._maker.tokenizer, spec)
        prompts.check_instruction(instruction)
        if spec is None:
            return self._cosines(first, second, use_tqdm)
        if spec.labels != 1:
            raise InvalidRequest(
                f"this model has {spec.labels} classes, and a score needs exactly one class: use classify",
                param="model",
            )
        pairs = [prompts.pair(one, two, instruction) for one, two in zip(first, second, strict=True)]
        many = [{"prompt_token_ids": ids} for ids in pairs]
        made = self.classify(many, use_activation=use_activation, use_tqdm=use_tqdm)
        return [
            ScoreOutput(score=float(one.probs[0]) if one.error is None else float("nan"), error=one.error)
            for one in made
        ]

    def _cosines(self, first: list[str], second: list[str], use_tqdm: bool) -> list[ScoreOutput]:
        texts = list(dict.fromkeys([*first, *second]))
        made = self._pool(list(texts), self._embeds("auto").pooled.mode, 0, use_tqdm)
        choice = {text: request.choices[0] for text, request in zip(texts, made, strict=True)}
        outputs = []
        for one, two in zip(first, second, strict=True):
            error = choice[one].error or choice[two].error
            score = cosine(choice[one].embedding, choice[two].embedding) if error is None else float("nan")
            outputs.append(ScoreOutput(score=score, error=error))
        return outputs

    def _embeds(self, pooling: Pool) -> Tasks:
        """Return the tasks of the model. Raise InvalidRequest if the checkpoint's layout gives no
        embeddings here."""
        tasks = Tasks.of(self.config.spec, pooling)
        if tasks.pooled.refused:
            raise InvalidRequest(f"no embeddings: {tasks.pooled.refused}", param="pooling")
        return tasks

    def _pool(
        self,
        prompts: list[Any],
        pooling: Pooling,
        priority: int | Sequence[int],
        use_tqdm: bool,
        lora: Loras = None,
    ) -> list[Request]:
        """Run one request per prompt that ends with the prompt. Raise the errors of ``generate``."""

        def make(prompt: Any, params: SamplingParams, seed: int, grammar: None) -> Request:
            return self._maker.to_embed(prompt, pooling, seed)

        return self._run(prompts, None, None, make, "prompt", use_tqdm, priority, lora)


def _texts(value: str | Sequence[str], param: str) -> list[str]:
    """Return one or many texts as a list. Raise InvalidRequest for other values."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{param} must be a text or a list of texts", param=param)
    return list(texts)
