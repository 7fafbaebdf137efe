"""A trainable model with the logprobs of the engine, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from weft.attention.registry import choose
from weft.common.errors import ConfigError, EngineDead
from weft.config.resolved import EngineConfig
from weft.engine.build import DTYPES, device_of
from weft.models.loader import load_plain
from weft.ops.sampling import to_x
from weft.parallel.comm import drive
from weft.train.attention import recorded_backends
from weft.train.masters import Masters, Published
from weft.train.packed import packed_step
from weft.train.recorded import RecordingBuild

Tensor = torch.Tensor


class Scored(NamedTuple):
    """A sequence whose last tokens get logprobs."""

    ids: Sequence[int]
    first: int
    """Index of the first token with a logprob; at least 1."""


class Policy:
    """The model of an engine's configuration, with gradients.

    The layers are the engine's layers, built with differentiable ops (``RecordingBuild``). An optimizer
    changes ``parameters``. ``settle`` makes the change visible to the forward pass.
    """

    def __init__(self, config: EngineConfig, *, progress: bool = True) -> None:
        """Load the weights of ``config.model_path``. Raises ConfigError for a model that cannot be
        trained."""
        check(config)
        self._kv = config.kv
        self._dtype, self._device = DTYPES[config.dtype], device_of(config)
        self._vocab = config.spec.vocab_size
        invariant = config.runner.deterministic
        backends = choose(
            config.runner.attention_backend,
            config.loaded,
            self._dtype,
            self._device,
            config.kv.block_size,
            invariant=invariant,
        )
        self._masters = Masters()
        self._backends = recorded_backends(backends, self._masters)
        build = RecordingBuild(
            dtype=self._dtype, device=self._device, invariant=invariant, masters=self._masters
        )
        self._model, weights, files = load_plain(
            config.model_path, config.loaded, build, config.model.load_format, progress
        )
        self._masters.add(self._model.named_parameters())
        self._published = Published(self._masters, weights, files)
        self._model.pack()
        # Some layers read a parameter without an op. Torch then computes the gradient.
        for master in self._masters:
            master.plain.requires_grad_(master.trained)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained master weights for the optimizer, by name in the modules of the engine."""
        return {master.name: master.value for master in self._masters if master.trained}

    def logprobs(self, sequences: Sequence[Scored]) -> list[Tensor]:
        """Return the logprobs of ``ids[first:]`` of each sequence, [tokens], from one packed forward pass.

        The values equal the engine's: log_softmax of the unmodified logits, in a wide dtype.
        """
        rows, tokens, counts = list[int](), list[int](), list[int]()
        begin = 0
        for ids, first in sequences:
            # The logits of a row belong to the next token.
            rows.extend(range(begin + first - 1, begin + len(ids) - 1))
            tokens.extend(ids[first:])
            counts.append(len(ids) - first)
            begin += len(ids)
        step, caches = packed_step(
            [one.ids for one in sequences], rows, self._kv, self._backends, self._dtype, self._device
        )
        logits = to_x(drive(self._model.steps(step, caches, self._backends)), self._vocab)
        wanted = torch.tensor(tokens, device=self._device).unsqueeze(1)
        made = logits.log_softmax(dim=-1).gather(1, wanted).squeeze(1)
        return list(made.split(counts))

    def gather(self) -> None:
        """Complete the gradients of ``parameters`` after the backward passes. Raises EngineDead for a
        parameter without a gradient: a layer of the model is not differentiable."""
        missing = []
        for master in self._masters:
            master.gather()
            if master.trained and master.value.grad is None:
                missing.append(master.name)
        if missing:
            raise EngineDead(f"no gradient reached {', '.join(missing[:4])}: this model cannot be trained")

    def settle(self) -> None:
        """Round the master weights to the model's parameters. Call after each optimizer step."""
        self._published.apply()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (published name, tensor) of the whole checkpoint, in the dtypes of the loaded checkpoint."""
        return self._published.tensors()

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients by published name."""
        return self._published.gradients()


def check(config: EngineConfig) -> None:
    """Raise ConfigError for a configuration that cannot be trained. The error names the setting to change."""
    # Each check excludes a path of the forward pass without gradients, or weights in more than one process.
    if config.spec.vision is not None:
        raise ConfigError("weft train trains text models: this model accepts images", param="--model")
    if not config.spec.head:
        raise ConfigError("this model cannot be trained: the model has no output head", param="--model")
    if config.model.load_format in ("dummy", "partial"):
        raise ConfigError("weft train needs weights: leave out --load-format", param="--load-format")
    if config.model.quantization != "none":
        raise ConfigError("weft train needs plain weights: leave out --quantization", param="--quantization")
    if config.parallel.tensor_parallel_size * config.parallel.data_parallel_size != 1:
        raise ConfigError(
            "weft train runs on one rank: leave out --tensor-parallel-size and --data-parallel-size",
            param="--tensor-parallel-size",
        )
    if config.lora.max_loras:
        raise ConfigError("weft train has no LoRA adapters: leave out --max-loras", param="--max-loras")
    for cache in config.spec.caches:
        if cache.kind not in ("full", "window", "chunk"):
            raise ConfigError(
                f"this model cannot be trained: a cache of the kind {cache.kind!r} has no gradient",
                param="--model",
            )
        if cache.fp8:
            raise ConfigError(
                "weft train needs a plain KV cache: leave out --kv-cache-dtype", param="--kv-cache-dtype"
            )
