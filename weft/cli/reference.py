"""The reference implementation for comparisons: ``transformers``, single process, without paging."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from weft.common.errors import ConfigError
from weft.config import hub
from weft.config.families import load_spec
from weft.config.sections.all import Config


class Reference:
    """A checkpoint loaded by ``transformers``, with the settings of the model section and --device."""

    def __init__(self, config: Config, path: str | None = None, dtype: str | None = None) -> None:
        """Load ``path`` (default: the configured model) in ``dtype`` (default: the configured dtype).

        Sets the number of threads of this process. Raise ConfigError if ``transformers`` is not installed or
        the checkpoint has no weights.
        """
        transformers = require_transformers()
        import torch

        from weft.engine.cpu_threads import set_threads

        set_threads(config.runner.threads)
        model = config.model
        if model.load_format == "dummy":
            raise ConfigError(
                "--load-format dummy: random weights can't be compared with a reference; remove one of the "
                "two flags",
                param="--load-format",
            )
        self.path = path or hub.resolve_model_path(model.model, model.revision)
        self.spec = load_spec(
            self.path,
            model.num_hidden_layers_override,
            trust_remote_code=model.trust_remote_code,
            language_model_only=True,  # only text is compared
            model_impl=model.model_impl,
        )
        name = dtype or (self.spec.dtype if model.dtype == "auto" else model.dtype)
        settings = transformers.AutoConfig.from_pretrained(
            self.path, trust_remote_code=model.trust_remote_code
        )
        if model.num_hidden_layers_override is not None:
            # transformers checks that layer_types has an entry per layer, so both are cut.
            text = settings.get_text_config()
            text.num_hidden_layers = self.spec.layers
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[: self.spec.layers]
        extra: dict[str, Any] = {"experts_implementation": "eager"} if self.spec.moe is not None else {}
        # Some models with images have no class for the text model alone.
        alone = type(settings) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        found = transformers.AutoModelForCausalLM if alone else transformers.AutoModelForImageTextToText
        loaded = found.from_pretrained(
            self.path,
            config=settings,
            dtype=getattr(torch, name),
            trust_remote_code=model.trust_remote_code,
            **extra,
        )
        device = "cuda" if config.runner.device != "cpu" and torch.cuda.is_available() else "cpu"
        self.model = loaded.eval().to(device)
        self.device = device
        self._tokenizer_path = (
            self.path if model.tokenizer is None else hub.resolve_model_path(model.tokenizer, None)
        )
        self._trust = model.trust_remote_code
        self._torch = torch

    def logits(self, ids: Sequence[int]) -> Any:
        """Return the logits at every position of ``ids``: [len(ids), vocab] on the CPU, in the dtype."""
        with self._torch.inference_mode():
            batch = self._torch.tensor([list(ids)], device=self.device)
            return self.model(batch, use_cache=False).logits[0].cpu()

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """Return the ``count`` likeliest tokens after ``ids`` (ties: the lowest id).

        No id ends the sequence.
        """
        torch = self._torch
        result = []
        past = None
        # Models without attention name the cache of states.
        names = inspect.signature(self.model.forward).parameters
        cache = "past_key_values" if "past_key_values" in names else "cache_params"
        batch = torch.tensor([list(ids)], device=self.device)
        with torch.inference_mode():
            for _ in range(count):
                output = self.model(batch, **{cache: past}, use_cache=True)
                past = output[cache]
                row = output.logits[0, -1, : self.spec.vocab_size]
                result.append(int((row == row.max()).nonzero()[0]))
                batch = torch.tensor([[result[-1]]], device=self.device)
        return result

    def chat(self, questions: Sequence[str], max_tokens: int | None) -> list[str]:
        """Return greedy answers to single-turn chats, computed as one left-padded batch."""
        prompts = [self.prompt([{"role": "user", "content": question}]) for question in questions]
        return self.texts(prompts, max_tokens)

    def prompt(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the token ids of a conversation, rendered by the chat template."""
        text = self._tokenizer.apply_chat_template(
            list(messages),
            tools=None if tools is None else list(tools),
            tokenize=False,
            add_generation_prompt=True,
        )
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def texts(self, prompts: Sequence[list[int]], max_tokens: int | None) -> list[str]:
        """Return greedy texts after prompts of token ids, computed as one left-padded batch."""
        torch = self._torch
        width = max(map(len, prompts))
        pad = self.spec.eos_ids[0] if self.spec.eos_ids else 0
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        most = min(max_tokens or self.spec.max_position, self.spec.max_position - width)
        with torch.inference_mode():
            made = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=most,
                eos_token_id=list(self.spec.eos_ids) or None,
                pad_token_id=pad,
            )
        decoded = self._tokenizer.batch_decode(made[:, width:], skip_special_tokens=True)
        return [str(text) for text in decoded]

    @cached_property
    def _tokenizer(self) -> Any:
        """Tokenizer of the model, loaded on first use."""
        return require_transformers().AutoTokenizer.from_pretrained(
            self._tokenizer_path, trust_remote_code=self._trust
        )


def require_transformers() -> Any:
    """Return the ``transformers`` module.

    Raise ConfigError with installation instructions if the module is missing.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "the reference needs the transformers package: pip install 'weft[reference]'", param="--reference"
        ) from error
    return transformers
