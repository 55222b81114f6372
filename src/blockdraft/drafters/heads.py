"""DSpark's Markov and confidence heads.

The Markov head adds ``W2 e_k`` to the logits of position k, with e_k of low rank
r made from the token before, ``x_{k-1}`` (x_0 is the anchor):

    vanilla   e_k = W1[x_{k-1}]
    gated     e_k = sigmoid(G [h_k ; W1 x_{k-1}]) * W1 x_{k-1}
    rnn       [g ; c ; o] = J [s ; W1 x_{k-1} ; h_k],  s' = sig(g) s + (1 - sig(g)) tanh(c),  e_k = tanh(o),  s_0 = 0
"""

import torch
from torch import Tensor, nn

from blockdraft.drafters.config import DrafterConfig


class MarkovHead(nn.Module):
    """Compute e_k from hidden states and previous tokens; ``markov_w2.weight`` ``[V, r]`` maps it to logits."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.kind = config.markov_head
        self.rank = rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.num_draft_tokens, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * rank, 3 * rank)

    def initial_state(self, hidden: Tensor) -> Tensor:
        """Return s_0 ``[A, r]``; heads without memory ignore it."""
        return hidden.new_zeros(hidden.shape[0], self.rank)

    def step(self, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Take one position: h_k ``[A, H]``, x_{k-1} ``[A]``, s ``[A, r]`` -> e_k ``[A, r]`` and the next s."""
        embedded = self.markov_w1(previous)
        if self.kind == "gated":
            return self.gate_proj(torch.cat([hidden, embedded], -1)).sigmoid() * embedded, state
        if self.kind == "rnn":
            gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
            keep = gate.sigmoid()
            return output.tanh(), keep * state + (1 - keep) * candidate.tanh()
        return embedded, state

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Take all positions along known tokens: ``[A, B, H]``, ``[A, B]`` -> ``[A, B, r]``."""
        if self.kind != "rnn":
            return self.step(hidden, previous, hidden)[0]
        state, outputs = self.initial_state(hidden), []
        for k in range(hidden.shape[1]):
            output, state = self.step(hidden[:, k], previous[:, k], state)
            outputs.append(output)
        return torch.stack(outputs, 1)


class ConfidenceHead(nn.Module):
    """Estimate the chance that position k is kept, ``sigmoid(w [h_k ; W1 x_{k-1}] + b)``; trained on the overlap."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return logits of the confidence, ``[...]``, from h ``[..., H]`` and W1 x ``[..., r]``."""
        logits: Tensor = self.proj(torch.cat([hidden, embedded], -1)).squeeze(-1)
        return logits
