"""Add the multi-token prediction (MTP) layer to DeepSeek-V3, for training and for measuring drafts.

The model class of ``transformers`` lacks the layer. The module adds it in the form of the published
checkpoints: one decoder layer after the last, with two norms and a projection before and a norm after.
Weights have the hub's names: ``model.layers.{L}.enorm.weight`` and so on, where L is the number of main
layers.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm


class SharedHead(nn.Module):
    """Apply the norm before the output head; the head belongs to the main model."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.norm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class MtpLayer(DeepseekV3DecoderLayer):
    """Drafts the token after next from a hidden state and the next token (DeepSeek-V3, section 2.2)."""

    def __init__(self, config: DeepseekV3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.enorm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = SharedHead(config)

    def forward(self, embedded: Tensor, hidden: Tensor, **kwargs: object) -> Tensor:
        """Hidden states [B, N, H] after the last norm, from embeddings and hidden states [B, N, H]."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return self.shared_head.norm(super().forward(x, **kwargs))


@dataclass
class ChainKeys:
    """Hold the keys of all chained steps in order. ``transformers`` uses the object as a cache."""

    latent: Tensor | None = None
    rotated: Tensor | None = None

    def update(self, latent: Tensor, rotated: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append a step's keys [B, 1, N, width], and return all."""
        if self.latent is not None and self.rotated is not None:
            latent, rotated = torch.cat((self.latent, latent), 2), torch.cat((self.rotated, rotated), 2)
        self.latent, self.rotated = latent, rotated
        return latent, rotated


def chain_mask(first: int, step: int) -> Tensor:
    """Return the additive mask [1, 1, N, keys] of chained step ``step``, with ``first`` entries in the first
    step.

    The j-th entry of a step sees the entries of the first step up to its own start, like a cache of verified
    tokens, and then the entries of its own chain.
    """
    rows = first - step
    parts = [torch.ones(rows, first).tril()]
    parts += [torch.eye(rows, first - s) for s in range(1, step + 1)]
    seen = torch.cat(parts, dim=1)
    return torch.where(seen > 0, 0.0, float("-inf"))[None, None]


class DeepseekV3WithMtp(DeepseekV3ForCausalLM):
    """Extend ``DeepseekV3ForCausalLM`` by an MTP layer: ``model.layers[L]``, which ``forward`` skips."""

    _keys_to_ignore_on_load_unexpected = (r"\.embed_tokens\.weight$", r"\.shared_head\.head\.weight$")

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config)
        self.model.layers.append(MtpLayer(config, config.num_hidden_layers))
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers would search the source of the defining module

    def chain(self, ids: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        """Return hidden states of drafts. Step s has [B, L - 1 - s, H]; entry i predicts ids[:, i + 2 + s].

        ``hidden`` [B, L, H] is the main model's output after the last norm. Step s > 0 takes the output of
        step s - 1 and the token drafted there. Training uses the token in ``ids`` [B, L] instead: equal for a
        correct draft.
        """
        layer, keys, outs = self.model.layers[-1], ChainKeys(), []
        first = ids.shape[1] - 1
        for s in range(min(steps, first)):
            hidden = hidden[:, :-1]  # [B, L - 1 - s, H]
            positions = torch.arange(1 + s, first + 1)[None]
            embedded = self.model.embed_tokens(ids[:, 1 + s :])
            hidden = layer(
                embedded,
                hidden,
                attention_mask=chain_mask(first, s),
                position_ids=positions,
                position_embeddings=self.model.rotary_emb(embedded, positions),
                past_key_values=keys,
            )
            outs.append(hidden)
        return outs


def cross_entropy(model: DeepseekV3WithMtp, hidden: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
    """Losses [N] of predicting ``ids`` [B, M] from ``hidden`` [B, M, H] where ``wanted`` [B, M]."""
    logits = model.lm_head(hidden[wanted]).float()
    return F.cross_entropy(logits, ids[wanted], reduction="none")


@torch.no_grad()
def draft_hits(model: DeepseekV3WithMtp, prompt: list[int], reply: list[int], drafts: int) -> Tensor:
    """Return bool [drafts, len(reply) - 1]: True where a draft equals the reply.

    Column i has chained drafts after the first i + 1 tokens of the greedy ``reply``. Drafts past the end
    count as misses. A draft after a wrong draft is computed from the correct token, so only hits before the
    first miss of a column are valid.
    """
    ids = torch.tensor([prompt + reply])
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    hits = torch.zeros(drafts, len(reply) - 1, dtype=torch.bool)
    for s, out in enumerate(model.chain(ids, hidden, drafts)):
        drafted = model.lm_head(out).argmax(-1)  # [1, L - 1 - s]
        row = (drafted[:, :-1] == ids[:, 2 + s :])[0, len(prompt) - 1 :]
        hits[s, : len(row)] = row
    return hits
