"""Add the MTP module to a Qwen3.5-MoE with images, and a fast path through both for training.

``transformers`` has no class for the module. The module here uses the published weight names (``mtp.*``). The
vision tower of ``transformers`` attends image by image in a loop; here images of one size share each layer
call.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeDecoderLayer,
    Qwen3_5MoePreTrainedModel,
    Qwen3_5MoeRMSNorm,
    Qwen3_5MoeVisionAttention,
    Qwen3_5MoeVisionModel,
    apply_rotary_pos_emb_vision,
)
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)


class _Parts(Qwen3_5MoePreTrainedModel):
    """Allow any implementation of experts: transformers searches the source of this module for the layers."""

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True


class Mtp(_Parts):
    """Drafts the token after next from a hidden state and the next token, by a layer of full attention."""

    def __init__(self, text: Qwen3_5MoeTextConfig) -> None:
        super().__init__(text)
        whole = text.layer_types.index("full_attention")
        self.pre_fc_norm_embedding = Qwen3_5MoeRMSNorm(text.hidden_size, eps=text.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5MoeRMSNorm(text.hidden_size, eps=text.rms_norm_eps)
        self.fc = nn.Linear(2 * text.hidden_size, text.hidden_size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5MoeDecoderLayer(text, whole)])
        self.norm = Qwen3_5MoeRMSNorm(text.hidden_size, eps=text.rms_norm_eps)
        self.post_init()

    def forward(self, embedded: Tensor, hidden: Tensor, **kwargs: object) -> Tensor:
        """Hidden states [B, N, H] after the last norm, from embeddings and hidden states [B, N, H]."""
        x = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1)
        return self.norm(self.layers[0](self.fc(x), **kwargs))


class Qwen3_5MoeWithMtp(_Parts, Qwen3_5MoeForConditionalGeneration):
    """Extend ``Qwen3_5MoeForConditionalGeneration`` by the MTP module, which ``forward`` skips."""

    _keys_to_ignore_on_load_unexpected = ()

    def __init__(self, config: Qwen3_5MoeConfig) -> None:
        super().__init__(config)
        self.mtp = Mtp(config.text_config)
        self.post_init()

    def see(self, images: Tensor) -> Tensor:
        """Return embedding rows [B, tokens, H] of grey images [B, height, width] (uint8) for the text
        model.
        """
        config = self.config.vision_config
        grid = grid_of(images, config.patch_size)
        return tower(
            self.model.visual, grey_patches(images, config.patch_size, config.spatial_merge_size), grid
        )

    def read(self, ids: Tensor, images: Tensor, routers: bool = False) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return hidden states [B, L, H] after the last norm, positions [3, B, L], and router logits per
        layer.

        ``ids`` [B, L] contain one image per row, at the same place in all rows.
        """
        model, config = self.model, self.config
        embedded = model.get_input_embeddings()(ids)
        rows = self.see(images).to(embedded.dtype)
        spots = ids == config.image_token_id
        embedded = embedded.masked_scatter(spots[..., None], rows)
        kinds = spots[:1].int()
        grid = torch.tensor([grid_of(images, config.vision_config.patch_size)])
        positions, _ = model.get_rope_index(ids[:1], kinds, image_grid_thw=grid)  # [3, 1, L]
        positions = positions.expand(3, len(ids), -1)
        out = model.language_model(
            inputs_embeds=embedded, position_ids=positions, use_cache=False, output_router_logits=routers
        )
        return out.last_hidden_state, positions, list(out.router_logits or ())

    def lookahead(self, ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """The module's hidden states [B, L - 1, H]; entry i drafts ids[:, i + 2] from hidden[:, i]."""
        text = self.model.language_model
        embedded = text.embed_tokens(ids[:, 1:])
        count = ids.shape[1] - 1
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        angles = text.rotary_emb(embedded, positions[:, :, :-1])
        made: Tensor = self.mtp(
            embedded, hidden[:, :-1], attention_mask=mask.to(embedded.dtype), position_embeddings=angles
        )
        return made


def grid_of(images: Tensor, patch: int) -> tuple[int, int, int]:
    """Frame groups, rows and columns of patches of images [B, height, width]."""
    return 1, images.shape[1] // patch, images.shape[2] // patch


def grey_patches(images: Tensor, patch: int, merge: int) -> Tensor:
    """Return patches [B, N, patch * patch] of grey images [B, height, width] (uint8), with values in -1 .. 1.

    Patches that are merged into one token are adjacent.
    """
    count, height, width = images.shape
    block = patch * merge
    cut = (images.float() / 127.5 - 1).view(
        count, height // block, merge, patch, width // block, merge, patch
    )
    return cut.permute(0, 1, 4, 2, 5, 3, 6).reshape(count, -1, patch * patch)


def patches(images: Tensor, patch: int, merge: int) -> Tensor:
    """Return patches [B, N, 3 * 2 * patch * patch] in the processor's layout. Colours and frames are
    equal.
    """
    cut = grey_patches(images, patch, merge)[:, :, None]  # [B, N, 1, p * p]
    return cut.expand(-1, -1, 6, -1).reshape(*cut.shape[:2], -1)


def tower(visual: Qwen3_5MoeVisionModel, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Return the tower's output [B, N / merge**2, H] for grey patches [B, N, values] of images of one
    ``grid``.
    """
    where = torch.tensor([grid])
    merge = visual.config.spatial_merge_size
    indices, shares = get_vision_interpolation_indices_and_weights(
        where,
        num_grid_per_side=visual.num_grid_per_side,
        mode=visual.interpolation_mode,
        align_corners=visual.interpolation_align_corners,
        spatial_merge_size=merge,
    )
    angles = visual.rotary_pos_emb(pixels, get_vision_position_ids(where, merge))
    kernel = visual.patch_embed.proj
    weight = kernel.weight.sum((1, 2)).flatten(1)  # colours and frames are alike
    x = F.linear(pixels, weight, kernel.bias)  # [B, N, width]
    x = x + (visual.pos_embed(indices) * shares[:, :, None]).sum(1).to(x.dtype)
    for block in visual.blocks:
        x = x + attend(block.attn, block.norm1(x), angles)
        x = x + block.mlp(block.norm2(x))
    made: Tensor = visual.merger(x.flatten(0, 1))
    return made.view(len(pixels), -1, made.shape[-1])


def attend(attention: Qwen3_5MoeVisionAttention, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Attention of a tower's layer within each image of ``x`` [B, N, width]."""
    count, length, _ = x.shape
    q, k, v = attention.qkv(x).view(count, length, 3, attention.num_heads, -1).unbind(2)  # [B, N, heads, dim]
    q, k = apply_rotary_pos_emb_vision(q, k, *angles)
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    # Images are small: plain attention has a much faster backward pass on a CPU than the fused one.
    mixed = (q @ k.mT * attention.scaling).softmax(-1).to(v.dtype) @ v
    made: Tensor = attention.proj(mixed.transpose(1, 2).reshape(count, length, -1))
    return made
