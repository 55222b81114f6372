"""Draft blocks: the shared backbone, and two final classes on top of it."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Self

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from blockdraft.drafters.attention import Anchors, BlockAttention, default_attention
from blockdraft.drafters.backbone import (
    ConfidenceHead,
    ContextCache,
    DraftingWeights,
    Layer,
    MarkovHead,
    RMSNorm,
    Rotary,
)
from blockdraft.drafters.config import DrafterConfig, SlotLayout
from blockdraft.errors import BlockdraftError
from blockdraft.targets import Target
from blockdraft.targets.decoder import Product, weights_key
from blockdraft.verification.sampler import draw, invert, uniform_for

MakeAttention = Callable[[Anchors, int, int, int], BlockAttention]
"""(anchors, num_slots, num_rows, context_length) -> how the blocks attend."""


@dataclass(frozen=True)
class Proposal:
    """Hold a drafted block: tokens ``[1, B]``, and q ``[1, B, V]``, exactly what they were sampled from."""

    tokens: Tensor
    probs: Tensor

    def until(self, ends: Collection[int]) -> "Proposal":
        """Return the block cut after the first end token in it: what follows one is never read."""
        tokens = self.tokens[0].tolist()
        length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        return Proposal(self.tokens[:, :length], self.probs[:, :length])


class Drafter(nn.Module, ABC):
    """Draft blocks, without an embedding and a head of its own: the target's are given, and frozen.

    draft_ids: ``[Vd]`` the tokens that it can propose, in the order of its head's rows, if it cannot propose all.
    """

    draft_ids: Tensor | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Rotary(config)
        size = config.draft_vocab_size
        self.register_buffer("draft_ids", None if size is None else torch.arange(size))
        self._reduced_head: tuple[Tensor, Product] | None = None
        self._drafting: list[tuple[object, DraftingWeights]] = []
        self.checkpoint_activations = False
        """Recompute each layer in the backward pass instead of keeping what it made."""

    # Training: many blocks at once

    def forward(
        self,
        features: Tensor,
        anchor_tokens: Tensor,
        anchors: Anchors,
        target: Target,
        make_attention: MakeAttention | None = None,
    ) -> Tensor:
        """Return the hidden states of the B predictions of each of A blocks.

        Args:
            features: ``[N, T, K * H]`` of the target, rows padded or packed as the caller likes.
            anchor_tokens: ``[A]`` the committed token each block starts from.
            anchors: where the blocks stand.
            target: for its embedding.
            make_attention: how to attend; by default SDPA on a CPU and flex attention on a GPU.

        Returns:
            ``[A, B, H]``; entry i predicts token ``position + 1 + i`` of the block's row.
        """
        num_rows, length = features.shape[:2]
        context = self.hidden_norm(self.fc(features))
        steps = torch.arange(length, device=features.device).expand(num_rows, -1)
        starts = self._row_positions(anchors, steps)
        context_rotary = self.rotary(starts, context.dtype)
        x = self._slots(anchor_tokens, target, context.dtype, self.config.num_slots)
        slots = torch.arange(self.config.num_slots, device=x.device)
        rotary = self.rotary((anchors.position - anchors.start)[:, None] + slots, x.dtype)
        attend = self._attention(anchors, num_rows, length, context, make_attention)
        for layer in self._layers():
            inputs = (x, rotary, context, context_rotary, attend)
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                x = layer(*inputs)
        return self._predictions(self.norm(x))

    def markov(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return DSpark's ``(prev_embedding [A, B, r], w2 [Vd, r])`` for the fused objective; None for DFlash."""
        del hidden, previous
        return None

    def head(self, target: Target) -> Tensor:
        """Return the rows of the target's head that the drafter uses, ``[Vd, H]``: all, or those of its tokens."""
        if self.draft_ids is None:
            return target.head
        if self._reduced_head is None or self._reduced_head[0] is not target.head:
            self._reduced_head = (target.head, Product(target.head[self.draft_ids.to(target.device)]))
        return self._reduced_head[1].weight

    def _head_product(self, hidden: Tensor, target: Target) -> Tensor:
        """Return the head's logits ``[1, b, Vd]`` of one block's hidden states ``[1, b, H]``."""
        if self.draft_ids is None:
            return target.logits(hidden)
        self.head(target)
        assert self._reduced_head is not None
        return self._reduced_head[1](hidden[0])[None]

    def logits(self, hidden: Tensor, previous: Tensor, target: Target) -> Tensor:
        """Return logits ``[A, B, V]`` of hidden ``[A, B, H]``, given the tokens before each position, ``[A, B]``.

        Tokens that the drafter cannot propose have minus infinity.
        """
        logits = linear(hidden.to(target.dtype), self.head(target))
        markov = self.markov(hidden, previous)
        if markov is not None:
            logits = logits + (markov[0] @ markov[1].T).to(logits.dtype)
        return self._spread(logits, -torch.inf)

    # Drafting: one block, with a cache

    @torch.no_grad()
    def new_cache(self, capacity: int) -> ContextCache:
        """Return an empty context cache for texts of up to ``capacity`` tokens, with the weights as they are now."""
        key = weights_key(self)
        if not self._drafting or self._drafting[0][0] != key:
            self._drafting[:] = [(key, DraftingWeights(self.config, self.fc, self.hidden_norm, self._layers()))]
        return ContextCache(self._drafting[0][1], self.config, capacity, self.rotary)

    @torch.no_grad()
    def extend(self, cache: ContextCache, features: Tensor, at: Tensor | None = None) -> None:
        """Append the features ``[1, T, K * H]`` of newly committed tokens; ``at`` as for `predict`."""
        cache.extend(features[0].to(self.fc.weight.dtype), at)

    def propose(
        self,
        cache: ContextCache,
        anchor: int | Tensor,
        target: Target,
        temperature: float,
        generator: Generator | None = None,
        *,
        num_proposals: int | None = None,
    ) -> Proposal:
        """Draft one block after ``anchor``, the token at position ``cache.length``: `predict`, then `draft`.

        Args:
            cache: the context, everything before the anchor.
            anchor: the last committed token; as a tensor ``[1]`` it need not leave the device.
            target: for its embedding and head.
            temperature: of the drafter's distribution; 0 takes the argmax.
            generator: for sampling.
            num_proposals: how many tokens b to propose, at most the B that the drafter was trained with; B if not
                given. Only the slots of b proposals are run, which costs less than all of them. Slots attend to each
                other, so q of a shorter block is close to, but not exactly, the first b of a whole block's. Decoding
                stays lossless, since the q that is returned is the one the tokens were drawn from.
        """
        if isinstance(anchor, int):
            anchor = torch.tensor([anchor], device=target.device)
        hidden = self.predict(cache, anchor, target, num_proposals)
        return self.draft(hidden, anchor, target, temperature, generator)

    @torch.no_grad()
    def predict(
        self,
        cache: ContextCache,
        anchor: Tensor,
        target: Target,
        num_proposals: int | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states ``[1, b, H]`` of the proposals after ``anchor`` ``[1]``; arguments as for `propose`.

        The anchor's position is ``cache.length``, or ``at`` ``[1]`` where only the device knows it; see `ContextCache`.
        """
        num = self.config.num_proposals if num_proposals is None else num_proposals
        self._check_num_proposals(num)
        x = self._slots(anchor, target, self.fc.weight.dtype, self.config.slots_for(num))[0]
        return self._predictions(self.norm(cache.block(x, at))[None])

    @abstractmethod
    def draft(
        self,
        hidden: Tensor,
        anchor: Tensor,
        target: Target,
        temperature: float,
        generator: Generator | None = None,
    ) -> Proposal:
        """Sample the block after ``anchor`` ``[1]`` from its hidden states ``[1, b, H]``; the rest as for `propose`."""

    def with_proposals(self, num_proposals: int) -> Self:
        """Return a drafter that shares these weights and proposes at most ``num_proposals`` tokens.

        Training, prediction and decoding then all run the slots of ``num_proposals`` tokens; see `propose`.
        """
        self._check_num_proposals(num_proposals)
        fewer = copy.copy(self)
        fewer.config = self.config.replace(num_proposals=num_proposals)
        return fewer

    def _attention(
        self, anchors: Anchors, num_rows: int, length: int, context: Tensor, make_attention: MakeAttention | None
    ) -> BlockAttention:
        num_slots, config = self.config.num_slots, self.config
        if make_attention is not None:
            return make_attention(anchors, num_slots, num_rows, length)
        device = context.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.fc.weight.dtype
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        return default_attention(anchors, num_slots, num_rows, length, heads, dtype)

    def _check_num_proposals(self, num: int) -> None:
        if not 1 <= num <= self.config.num_proposals:
            raise BlockdraftError(
                f"this drafter can propose {self.config.num_proposals} tokens; num_proposals must be between 1 and "
                f"that, not {num}"
            )

    def _slots(self, anchor_tokens: Tensor, target: Target, dtype: torch.dtype, num_slots: int) -> Tensor:
        """Return the embeddings ``[A, S, H]`` of ``[anchor, MASK, MASK, ..]``."""
        tokens = torch.full((len(anchor_tokens), num_slots), self.config.mask_token_id, device=target.device)
        tokens[:, 0] = anchor_tokens
        return target.embed(tokens).to(dtype)

    def _spread(self, values: Tensor, elsewhere: float) -> Tensor:
        """Return ``[..., V]`` from values ``[..., Vd]`` of the drafter's own tokens; other tokens get ``elsewhere``."""
        if self.draft_ids is None:
            return values
        whole = values.new_full((*values.shape[:-1], self.config.vocab_size), elsewhere)
        whole[..., self.draft_ids] = values
        return whole

    def _token_ids(self, tokens: Tensor) -> Tensor:
        """Return token ids of indices into the drafter's own tokens."""
        return tokens if self.draft_ids is None else self.draft_ids[tokens]

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _predictions(self, hidden: Tensor) -> Tensor:
        """Return the slots that predict something, in order: ``[A, B, H]`` of ``[A, S, H]``."""
        return hidden[:, 1:] if self.config.slot_layout is SlotLayout.FILL_IN else hidden

    @staticmethod
    def _row_positions(anchors: Anchors, steps: Tensor) -> Tensor:
        """Return rotary positions ``[N, T]`` of the context, counted from the start of the sequence each belongs to."""
        begins = torch.zeros_like(steps)
        begins.index_put_((anchors.row, anchors.start), anchors.start)
        return steps - begins.cummax(-1).values


class DFlash(Drafter):
    """Draft all positions at once, independent of each other given the context."""

    @torch.no_grad()
    def draft(
        self,
        hidden: Tensor,
        anchor: Tensor,
        target: Target,
        temperature: float,
        generator: Generator | None = None,
    ) -> Proposal:
        del anchor
        probs = draft_probs_of(self._head_product(hidden.to(target.dtype), target), temperature)
        tokens = draw(probs, generator)
        return Proposal(self._token_ids(tokens), self._spread(probs, 0.0))


class DSpark(Drafter):
    """Draft with one backbone pass, then a short left-to-right loop through the Markov head."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        if config.confidence_head:
            self.confidence_head = ConfidenceHead(config)

    def markov(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.markov_head(hidden, previous), self.markov_head.markov_w2.weight

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Return the confidence head's logits ``[A, B]`` along known tokens."""
        if not self.config.confidence_head:
            raise BlockdraftError("this drafter has no confidence head")
        logits: Tensor = self.confidence_head(hidden, self.markov_head.markov_w1(previous))
        return logits

    @torch.no_grad()
    def draft(
        self,
        hidden: Tensor,
        anchor: Tensor,
        target: Target,
        temperature: float,
        generator: Generator | None = None,
    ) -> Proposal:
        base = self._head_product(hidden.to(target.dtype), target)[0].float()
        positions = zip(hidden.unbind(1), base.split(1), uniform_for(base, generator).split(1), strict=True)
        head, previous = self.markov_head, anchor
        state = head.initial_state(hidden)
        tokens, rows = [], []
        for hidden_k, logits, uniform in positions:
            embedded, state = head.step(hidden_k, previous, state)
            probs = draft_probs_of(head.add_to(logits, embedded), temperature)
            previous = self._token_ids(invert(probs, uniform))
            tokens.append(previous)
            rows.append(probs)
        return Proposal(torch.cat(tokens)[None], self._spread(torch.cat(rows)[None], 0.0))


def draft_probs_of(logits: Tensor, temperature: float) -> Tensor:
    """Return q from logits ``[..., V]``, in float32; temperature 0 is one-hot at the argmax."""
    if temperature == 0:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1)
    logits = logits.float()
    return (logits if temperature == 1 else logits / temperature).softmax(-1)


def build_drafter(config: DrafterConfig) -> Drafter:
    """Return a drafter with fresh weights."""
    return DFlash(config) if config.kind == "dflash" else DSpark(config)
