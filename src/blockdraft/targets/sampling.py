"""Turn a target's logits into the distribution to sample from, under temperature, top-k and top-p."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Says which distribution is sampled from. Verification is lossless for this very one.

    temperature: 0 is greedy.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probability reaches p; 1 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature and top_k must not be negative and top_p must lie in (0, 1]: "
                f"{self.temperature}, {self.top_k}, {self.top_p}"
            )

    def probs(self, logits: Tensor) -> Tensor:
        """Return the probabilities ``[..., V]`` in float32."""
        if self.temperature == 0:
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1)
        logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            lowest = logits.topk(self.top_k, -1).values[..., -1:]
            logits = logits.masked_fill(logits < lowest, -torch.inf)
        probs = logits.softmax(-1)
        if self.top_p < 1:
            ordered, order = probs.sort(-1, descending=True)
            before = ordered.cumsum(-1) - ordered
            ordered = ordered.masked_fill(before >= self.top_p, 0)
            probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs
