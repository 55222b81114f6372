"""Acceptance lengths without decoding: exact along the target's own texts.

Verification is lossless, so the text that decoding writes is a text of the target. Given that text x, a round that
starts at one of its tokens keeps at least i of the next ones with probability

    block   min(1, r_1, .., r_i),         r_i = prod_{j<=i} q_j(x_j) / p_j(x_j)
    token   prod_{j<=i} min(1, q_j(x_j) / p_j(x_j))
    greedy  1[x_j = argmax q_j for all j <= i]          (x the target's greedy text)

(the first is the paper's score along target paths), and what follows is again the target's. So where the rounds
start is a Markov chain along the text, and the expected number of rounds it took to write it is a sum over its states.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.data import Batch, Completion, OnlineFeatures, TextAnchors, TextDataset, collate
from blockdraft.decoding import generate
from blockdraft.drafters import Drafter
from blockdraft.targets import Target
from blockdraft.verification import Rule

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]
LOGITS_PER_PASS = 2**26


@dataclass(frozen=True)
class Rounds:
    """Expected sums over the rounds that write a text.

    num: rounds. tokens: what they add, correction and bonus tokens included.
    """

    num: float
    tokens: float

    def __add__(self, other: "Rounds") -> "Rounds":
        return Rounds(self.num + other.num, self.tokens + other.tokens)


def retention(
    rule: Rule, log_q: Numbers, log_p: Numbers, agrees: NDArray[np.bool_], valid: NDArray[np.bool_]
) -> Numbers:
    """``[A, B]`` probabilities of keeping at least i tokens of the text, from A positions; 0 where it has ended.

    Args:
        rule: how blocks are verified.
        log_q, log_p: ``[A, B]`` of the text's tokens under drafter and target.
        agrees: ``[A, B]`` whether the drafter's argmax is the token.
        valid: ``[A, B]`` which tokens exist.
    """
    if rule == "greedy":
        kept = np.cumprod(agrees.astype(np.float64), 1)
    else:
        ratio = np.where(valid, log_q - log_p, 0.0)
        if rule == "block":
            kept = np.exp(np.minimum(np.minimum.accumulate(np.cumsum(ratio, 1), 1), 0.0))
        else:
            kept = np.exp(np.cumsum(np.minimum(ratio, 0.0), 1))
    return np.where(valid, kept, 0.0)


def walk(kept: Numbers, end: int | None) -> Rounds:
    """Follow the rounds along a text.

    Args:
        kept: ``[A, B]`` as `retention` gives it, for a round starting at token a = 0, 1, .. A - 1 of the response;
            a text is finished once a round adds token A or a later one.
        end: index of the end token, after which there is no correction or bonus; None if there is none in reach.
    """
    num_starts, block_size = kept.shape
    padded = np.concatenate([np.ones((num_starts, 1)), kept, np.zeros((num_starts, 1))], 1)
    exactly = padded[:, :-1] - padded[:, 1:]  # [A, B + 1]: k tokens kept, no more
    steps = np.arange(block_size + 1)
    reached = np.zeros(num_starts + block_size + 1)
    reached[0] = 1.0
    tokens = 0.0
    for start in range(num_starts):
        chance = reached[start] * exactly[start]
        ended = start + steps == end
        tokens += float(chance @ (steps + ~ended))
        reached[start + 1 : start + block_size + 2] += np.where(ended, 0.0, chance)
    return Rounds(float(reached[:num_starts].sum()), tokens)


class Predictor:
    """Predicts the rounds of one drafter on texts of its target."""

    def __init__(self, target: Target, drafter: Drafter, temperature: float, max_new_tokens: int, seed: int) -> None:
        self.target, self.drafter = target, drafter
        self.temperature, self.max_new_tokens, self.seed = temperature, max_new_tokens, seed
        self.features = OnlineFeatures(target, drafter.config.target_layers)

    @torch.no_grad()
    def predict(
        self, row: Completion, rules: Sequence[Rule], draft_temperatures: Sequence[float]
    ) -> dict[Rule, list[Rounds]]:
        """Expected rounds by rule, one for each draft temperature (under greedy verification a single one).

        The row is a response under the law that the rules verify: greedy for ``"greedy"``, sampled for the others.
        """
        response = self._beyond_the_budget(row)
        ended = response[-1] in self.target.eos_ids
        num_starts = min(len(response), self.max_new_tokens) - 1
        if num_starts < 1:
            return {rule: [Rounds(0.0, 0.0)] * (1 if rule == "greedy" else len(draft_temperatures)) for rule in rules}
        first = len(row.prompt_ids)
        paths = TextDataset.of([Completion(row.id, row.prompt_ids, response, row.finish_reason)])
        chosen = TextAnchors(0, first + np.arange(num_starts))
        batch = collate([chosen], paths, self.drafter.config.num_proposals).to(self.target.device)
        scores = self._scores(batch, draft_temperatures if self.temperature > 0 else (0.0,))
        valid = batch.valid.cpu().numpy()
        end = len(response) - 1 if ended else None
        found: dict[Rule, list[Rounds]] = {}
        for rule in rules:
            laws = scores.log_q[:1] if rule == "greedy" else scores.log_q
            found[rule] = [walk(retention(rule, log_q, scores.log_p, scores.agrees, valid), end) for log_q in laws]
        return found

    def _beyond_the_budget(self, row: Completion) -> list[int]:
        """The response, and as many tokens more as the last block may reach if the budget cut it."""
        if row.response_ids[-1] in self.target.eos_ids:
            return row.response_ids
        more = generate(
            self.target, None, [*row.prompt_ids, *row.response_ids], temperature=self.temperature,
            rule="block" if self.temperature > 0 else "greedy", max_new_tokens=self.drafter.config.num_proposals,
            seed=self.seed,
        )  # fmt: skip
        return [*row.response_ids, *more.tokens]

    def _scores(self, batch: Batch, draft_temperatures: Sequence[float]) -> "_Scores":
        output = self.features(batch)
        assert output.features is not None
        target_hidden = batch.at_blocks(output.hidden)
        per_pass = max(1, LOGITS_PER_PASS // (self.target.vocab_size * batch.valid.shape[1]))
        hidden = self.drafter(
            output.features.to(self.drafter.fc.weight.dtype), batch.anchor_tokens, batch.anchors, self.target
        )
        parts: list[_Scores] = []
        for at in range(0, len(batch.anchors), per_pass):
            piece = slice(at, at + per_pass)
            logits = self.drafter.logits(hidden[piece], batch.previous[piece], self.target)
            labels = batch.labels[piece]
            log_p = _log_law(self.target.logits(target_hidden[piece]), labels, self.temperature)
            log_q = [_log_law(logits, labels, temperature) for temperature in draft_temperatures]
            agrees = (logits.argmax(-1) == labels).cpu().numpy()
            parts.append(_Scores(np.stack(log_q), log_p, agrees))
        return _Scores(
            np.concatenate([part.log_q for part in parts], 1),
            np.concatenate([part.log_p for part in parts]),
            np.concatenate([part.agrees for part in parts]),
        )


@dataclass(frozen=True)
class _Scores:
    """log_q ``[temperatures, A, B]``, log_p and agrees ``[A, B]``."""

    log_q: Numbers
    log_p: Numbers
    agrees: Flags


def _log_law(logits: Tensor, labels: Tensor, temperature: float) -> Numbers:
    """Log-probabilities ``[A, B]`` of labels; at temperature 0 they say nothing and are 0."""
    if temperature == 0:
        return np.zeros(labels.shape)
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    result: Numbers = (chosen - scaled.logsumexp(-1)).double().cpu().numpy()
    return result
