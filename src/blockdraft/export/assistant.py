"""Let a DFlash drafter assist transformers' own ``generate``, with no engine and no export in between.

transformers 5.22 drafts with ``generate(assistant_model=..., speculation_type="dflash")``. Each round it hands the
assistant the target's features of newly committed tokens and the embeddings of ``[anchor, MASK, MASK, ..]``, takes the
hidden states back, drops that of slot 0, and applies the target's head. Verification is its own: greedy, or token by
token with ``do_sample=True``.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, Qwen3Config
from transformers.modeling_outputs import BaseModelOutput

from blockdraft.drafters import Drafter, SlotLayout
from blockdraft.drafters.backbone import Attend, Layer
from blockdraft.errors import BlockdraftError


class DFlashAssistant(nn.Module):
    """Answer transformers' calls with a drafter's hidden states; it shares the drafter's weights.

    config: what transformers asks of an assistant: ``target_layer_ids`` (decoder outputs, counted from 0),
        ``block_size`` (slots, the anchor's among them), ``mask_token_id``, and the layers its cache is made for.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        own = drafter.config
        self.drafter = drafter
        self.config = Qwen3Config(
            hidden_size=own.hidden_size,
            intermediate_size=own.intermediate_size,
            num_hidden_layers=own.num_layers,
            num_attention_heads=own.num_heads,
            num_key_value_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            vocab_size=own.vocab_size,
        )
        self.config.target_layer_ids = list(own.target_layers)
        self.config.block_size = own.num_slots
        self.config.mask_token_id = own.mask_token_id

    @property
    def device(self) -> torch.device:
        """Tell where the drafter is."""
        return self.drafter.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Give the dtype of the drafter's weights."""
        return self.drafter.fc.weight.dtype

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache,
        **_ignored: Any,
    ) -> BaseModelOutput:
        """Run one block.

        Args:
            noise_embeds: ``[1, S, H]``, the target's embeddings of the anchor and the masks.
            context_hidden_states: ``[1, T, K * H]``, features of the tokens committed since the last call.
            position_ids: ``[1, T + S]``, of both.
            attention_mask: ``[1, P + T + S]``, the P positions in the cache included, 0 where padding stands; or None.
            past_key_values: keys and values of the context; the block's are appended too, and cropped by the caller.

        Returns:
            ``last_hidden_state`` ``[1, S, H]`` of all slots.
        """
        drafter, num_new = self.drafter, context_hidden_states.shape[1]
        context = drafter.hidden_norm(drafter.fc(context_hidden_states.to(self.dtype)))
        context_rotary, rotary = (
            drafter.rotary(positions, self.dtype)
            for positions in (position_ids[:, :num_new], position_ids[:, num_new:])
        )
        visible = None if attention_mask is None else attention_mask[:, None, None].bool()
        x = noise_embeds.to(self.dtype)
        for index, layer in enumerate(drafter.layers):
            assert isinstance(layer, Layer)
            x = layer(x, rotary, context, context_rotary, _attend(past_key_values, index, visible))
        return BaseModelOutput(last_hidden_state=drafter.norm(x).to(noise_embeds.dtype))


def _attend(cache: Cache, index: int, visible: Tensor | None) -> Attend:
    """Return the attention of one block to the cached context, the new context and itself."""

    def run(q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        keys, values = cache.update(torch.cat([context_k, k], 2), torch.cat([context_v, v], 2), index)
        return scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)

    return run


def as_assistant(drafter: Drafter) -> DFlashAssistant:
    """Return a drafter in the form that transformers' ``generate`` takes as ``assistant_model``.

    The target is any causal language model that `load_target` accepts; Qwen3, Qwen2 and Llama are tested::

        target = blockdraft.targets.load_target("Qwen/Qwen3-4B")
        assistant = as_assistant(load_drafter("runs/x", target))
        target.model.generate(**inputs, assistant_model=assistant, speculation_type="dflash", do_sample=True)

    Its verification is token by token; `blockdraft.decoding.generate` verifies blocks. Only DFlash drafters can be
    assistants: transformers has no Markov head.
    """
    if drafter.config.kind != "dflash":
        raise BlockdraftError(
            "a DSpark drafter cannot be an assistant of transformers, which has no Markov head; decode with "
            "blockdraft.decoding.generate"
        )
    if drafter.config.slot_layout is not SlotLayout.FILL_IN:
        raise BlockdraftError(
            "slot 0 of this drafter predicts a token, and transformers discards slot 0; decode with "
            "blockdraft.decoding.generate"
        )
    return DFlashAssistant(drafter).eval()
