"""A reduced draft vocabulary: which tokens a drafter may propose, and how far that can carry it."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockdraft.data import TextDataset


def choose_draft_ids(dataset: TextDataset, vocab_size: int, wanted: float) -> NDArray[np.int64]:
    """Return the most frequent response tokens, in ascending order.

    Args:
        dataset: the texts that the drafter is trained on.
        vocab_size: V, the target's.
        wanted: how many tokens, or the share of all response tokens to cover if it is below 1.
    """
    counts = np.bincount(response_tokens(dataset), minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")  # of equally frequent ones, the smaller ids
    if wanted >= 1:
        num = min(int(wanted), vocab_size)
    else:
        covered = np.cumsum(counts[order]) / counts.sum()
        num = int(np.searchsorted(covered, wanted)) + 1
    return np.sort(order[:num])


def response_tokens(dataset: TextDataset) -> NDArray[np.int64]:
    """Return the response tokens of all texts, end to end."""
    parts = [dataset[i][dataset.prompt_lengths[i] :] for i in range(len(dataset))]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


@dataclass(frozen=True)
class Coverage:
    """What a reduced vocabulary leaves of held-out texts.

    share: of response tokens that are in it.
    longest: the mean number of tokens that a block of B could have accepted at most: those before the first token
        that is not in it. Verification cannot keep more of any text, whatever the drafter learns.
    """

    num_tokens: int
    share: float
    longest: float
    num_proposals: int

    def __str__(self) -> str:
        return (
            f"draft vocabulary: {self.num_tokens:,} tokens cover {self.share:.2%} of held-out responses; at most "
            f"{self.longest:.2f} of {self.num_proposals} drafted tokens can be accepted"
        )


def coverage(dataset: TextDataset, draft_ids: NDArray[np.int64], vocab_size: int, num_proposals: int) -> Coverage:
    """Measure a draft vocabulary on texts: how many tokens it covers, and the bound on lengths that follows."""
    known = np.zeros(vocab_size, dtype=bool)
    known[draft_ids] = True
    inside = total = 0
    reach: list[int] = []
    for i in range(len(dataset)):
        covered = known[dataset[i][dataset.prompt_lengths[i] :]]
        inside, total = inside + int(covered.sum()), total + len(covered)
        run = 0
        for position in range(len(covered) - 1, 0, -1):  # the anchor before a block is a response token, too
            run = run + 1 if covered[position] else 0
            if position + num_proposals <= len(covered):
                reach.append(min(run, num_proposals))
    share = inside / total if total else math.nan
    return Coverage(len(draft_ids), share, float(np.mean(reach)) if reach else math.nan, num_proposals)
