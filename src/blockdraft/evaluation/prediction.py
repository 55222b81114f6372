"""Predict acceptance lengths without decoding, exactly along the target's own texts.

Verification is lossless, so the text that decoding writes is a text of the target. Given that text x, a round that
starts at one of its tokens keeps at least i of the next ones with probability

    block   min(1, r_1, .., r_i),         r_i = prod_{j<=i} q_j(x_j) / p_j(x_j)
    token   prod_{j<=i} min(1, q_j(x_j) / p_j(x_j))

(the first is the paper's score along target-generated texts), and what follows is again the target's. So where the
rounds start is a Markov chain along the text, and the expected number of rounds it took to write it is a sum over its
states.

Where the drafter proposes its argmax, q is one-hot: the ratio is 1 / p_j(x_j) >= 1 while x_j is the argmax, and 0 at
the first difference, so both probabilities are 1[x_j = argmax q_j for all j <= i]. The same holds for greedy
verification, where x is the target's greedy text.

The probability of keeping at least i tokens asks for the first i proposals only. So the same probabilities, cut after
b of them, give the rounds of blocks that are cut to b proposals, for every b up to B at once.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import model_validator
from torch import Tensor

from blockdraft.data import Batch, Completion, Features, OnlineFeatures, TextAnchors, TextDataset, collate
from blockdraft.decoding import generate
from blockdraft.drafters import Drafter
from blockdraft.drafters.drafter import MakeAttention
from blockdraft.evaluation.protocol import ONE_HOT, Protocol
from blockdraft.evaluation.results import EvaluationError, Strict, TemperaturePoint, read_evaluation_file
from blockdraft.evaluation.tasks import Task
from blockdraft.targets import Target
from blockdraft.verification import Rule

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]
LOGITS_PER_PASS = 2**26


@dataclass(frozen=True)
class RoundSums:
    """Holds expected sums over the rounds that write a text.

    num: rounds. tokens: what they add, correction and bonus tokens included.
    """

    num: float = 0.0
    tokens: float = 0.0

    def __add__(self, other: "RoundSums") -> "RoundSums":
        return RoundSums(self.num + other.num, self.tokens + other.tokens)


def retention(rule: Rule, log_q: Numbers, log_p: Numbers, valid: Flags) -> Numbers:
    """Return ``[A, B]`` probabilities of keeping at least i tokens of a sampled text, from A positions.

    Args:
        rule: ``"token"`` or ``"block"``.
        log_q, log_p: ``[A, B]`` of the text's tokens under drafter and target.
        valid: ``[A, B]`` which tokens exist; the probability is 0 where the text has ended.
    """
    ratio = np.where(valid, log_q - log_p, 0.0)
    if rule == "block":
        kept = np.exp(np.minimum(np.minimum.accumulate(np.cumsum(ratio, 1), 1), 0.0))
    else:
        kept = np.exp(np.cumsum(np.minimum(ratio, 0.0), 1))
    return np.where(valid, kept, 0.0)


def agreement(agrees: Flags, valid: Flags) -> Numbers:
    """Return the same for argmax drafts, under any rule: 1 as far as the text is what the drafter proposes.

    agrees: ``[A, B]`` whether the drafter's argmax is the text's token.
    """
    return np.where(valid, np.cumprod(agrees.astype(np.float64), 1), 0.0)


def walk(kept: Numbers, end: int | None) -> RoundSums:
    """Follow the rounds along a text, and return their expected sums.

    Args:
        kept: ``[A, B]`` as `retention` and `agreement` give it, for a round starting at token a = 0, 1, .. A - 1 of the
            response; a text is finished once a round adds token A or a later one.
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
    return RoundSums(float(reached[:num_starts].sum()), tokens)


def walk_all(kept: Numbers, end: int | None) -> list[RoundSums]:
    """Follow many chains of rounds along one text at once; `walk`, which it agrees with, follows one.

    kept: ``[K, A, B]``, a matrix of `walk` for each chain.
    """
    num_chains, num_starts, block_size = kept.shape
    exactly = np.empty((num_starts, num_chains, block_size + 1))
    exactly[:, :, 0], exactly[:, :, 1:] = 1.0, kept.transpose(1, 0, 2)
    exactly[:, :, :-1] -= exactly[:, :, 1:]
    reached = np.zeros((num_chains, num_starts + block_size + 1))
    reached[:, 0] = 1.0
    steps = np.arange(block_size + 1.0)
    tokens = np.zeros(num_chains)
    for start in range(num_starts):
        chance = exactly[start]
        chance *= reached[:, start, None]
        tokens += chance @ steps + chance.sum(1)
        if end is not None and start <= end <= start + block_size:
            tokens -= chance[:, end - start]  # the end token is the last one: nothing is added to it
            chance[:, end - start] = 0.0
        reached[:, start + 1 : start + block_size + 2] += chance
    return [RoundSums(float(n), float(t)) for n, t in zip(reached[:, :num_starts].sum(1), tokens, strict=True)]


def cut_blocks(kept: Numbers) -> Numbers:
    """Return ``[B, A, B]``: what blocks of 1, 2, .. B proposals keep, where whole blocks keep ``kept`` ``[A, B]``."""
    block_size = kept.shape[1]
    return np.where(np.tri(block_size, dtype=bool)[:, None, :], kept, 0.0)


@dataclass(frozen=True)
class PredictedRounds:
    """Holds the expected rounds on one text under one rule.

    whole: for each draft temperature, with whole blocks.
    by_proposals: at the first draft temperature, with blocks cut to 1, 2, .. B proposals.
    """

    whole: list[RoundSums]
    by_proposals: list[RoundSums]


class Predictor:
    """Predicts the rounds of one drafter on texts of its target.

    features: where the target's features come from; the target itself unless given.
    frozen: the embedding and head that the drafter uses, if they are not the target's.
    make_attention: how blocks attend, if not as the drafter does by itself.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        temperature: float,
        max_new_tokens: int,
        seed: int,
        *,
        features: Features | None = None,
        frozen: Target | None = None,
        make_attention: MakeAttention | None = None,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.temperature, self.max_new_tokens, self.seed = temperature, max_new_tokens, seed
        self.features = features or OnlineFeatures(target, drafter.config.target_layers)
        self.frozen, self.make_attention = frozen or target, make_attention

    def predict(
        self, row: Completion, draft_temperatures: Mapping[Rule, Sequence[float]]
    ) -> dict[Rule, list[RoundSums]]:
        """Return the expected rounds by rule, one for each of its draft temperatures, where 0 stands for argmax drafts.

        The row is a text of the kind that the rules write: greedy for ``"greedy"``, sampled for the others.
        """
        return {rule: found.whole for rule, found in self.predict_cuts(row, draft_temperatures).items()}

    @torch.no_grad()
    def predict_cuts(
        self, row: Completion, draft_temperatures: Mapping[Rule, Sequence[float]]
    ) -> dict[Rule, PredictedRounds]:
        """Return what `predict` does, and beside it the rounds of blocks that are cut to fewer proposals."""
        response = self._beyond_the_budget(row)
        num_starts = min(len(response), self.max_new_tokens) - 1
        num_proposals = self.drafter.config.num_proposals
        if num_starts < 1:
            none = RoundSums()
            return {
                rule: PredictedRounds([none] * len(given), [none] * num_proposals)
                for rule, given in draft_temperatures.items()
            }
        texts = TextDataset.of([Completion(row.id, row.prompt_ids, response, row.finish_reason)])
        chosen = TextAnchors(0, len(row.prompt_ids) + np.arange(num_starts))
        batch = collate([chosen], texts, num_proposals).to(self.target.device)
        sampled = sorted({each for given in draft_temperatures.values() for each in given} - {ONE_HOT})
        scores = self._scores(batch, sampled)
        valid = batch.valid.cpu().numpy()
        end = len(response) - 1 if response[-1] in self.target.eos_ids else None

        def kept(rule: Rule, draft_temperature: float) -> Numbers:
            if draft_temperature == ONE_HOT:
                return agreement(scores.agrees, valid)
            return retention(rule, scores.log_q[sampled.index(draft_temperature)], scores.log_p, valid)

        found = {}
        for rule, given in draft_temperatures.items():
            whole = np.stack([kept(rule, each) for each in given])
            rounds = walk_all(np.concatenate([whole, cut_blocks(whole[0])]), end)
            found[rule] = PredictedRounds(rounds[: len(given)], rounds[len(given) :])
        return found

    def _beyond_the_budget(self, row: Completion) -> list[int]:
        """Return the response, and as many tokens more as the last block may reach if the budget cut it."""
        reach = self.max_new_tokens + self.drafter.config.num_proposals
        if row.response_ids[-1] in self.target.eos_ids or len(row.response_ids) >= reach:
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
        features = output.features.to(self.drafter.fc.weight.dtype)
        hidden = self.drafter(features, batch.anchor_tokens, batch.anchors, self.frozen, self.make_attention)
        parts: list[_Scores] = []
        for at in range(0, len(batch.anchors), per_pass):
            piece = slice(at, at + per_pass)
            logits = self.drafter.logits(hidden[piece], batch.previous[piece], self.frozen)
            labels = batch.labels[piece]
            log_q, log_p = np.zeros((len(draft_temperatures), *labels.shape)), np.zeros(labels.shape)
            for number, temperature in enumerate(draft_temperatures):
                log_q[number] = _log_probs(logits, labels, temperature)
            if draft_temperatures:
                log_p = _log_probs(self.target.logits(target_hidden[piece]), labels, self.temperature)
            parts.append(_Scores(log_q, log_p, (logits.argmax(-1) == labels).cpu().numpy()))
        return _Scores(
            np.concatenate([part.log_q for part in parts], 1),
            np.concatenate([part.log_p for part in parts]),
            np.concatenate([part.agrees for part in parts]),
        )


@dataclass(frozen=True)
class _Scores:
    """Holds log_q ``[temperatures, A, B]``, log_p and agrees ``[A, B]``."""

    log_q: Numbers
    log_p: Numbers
    agrees: Flags


def _log_probs(logits: Tensor, labels: Tensor, temperature: float) -> Numbers:
    """Return the log-probabilities ``[A, B]`` of labels."""
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    result: Numbers = (chosen - scaled.logsumexp(-1)).double().cpu().numpy()
    return result


class PredictionSettings(Strict):
    """Says what a file of predictions rests on; one that rests on anything else is made again.

    drafter: fingerprint of its weights and configuration. texts: identity of the target's texts.
    draft_temperatures: by rule.
    """

    drafter: str
    texts: str
    temperature: float
    max_new_tokens: int
    seed: int
    draft_temperatures: dict[Rule, list[float]]


class PredictedText(Strict):
    """Holds the expected rounds of one text by rule: their number and their tokens.

    rounds: for each draft temperature. by_proposals: at the first one, with blocks cut to 1, 2, .. B proposals.
    """

    prompt: str
    rounds: dict[Rule, list[tuple[float, float]]]
    by_proposals: dict[Rule, list[tuple[float, float]]]


class PredictionFile(Strict):
    """Holds the predictions of one drafter on one folder of the target's texts: ``predictions/*.json``."""

    format: Literal["blockdraft.predictions/2"] = "blockdraft.predictions/2"
    settings: PredictionSettings
    texts: list[PredictedText]

    @model_validator(mode="after")
    def _complete(self) -> "PredictionFile":
        for text in self.texts:
            if _sizes(text.rounds) != _sizes(self.settings.draft_temperatures):
                raise ValueError(f"{text.prompt} does not have one prediction for each draft temperature")
            if _sizes(text.by_proposals) != _sizes(self.texts[0].by_proposals):
                raise ValueError(f"{text.prompt} does not have as many proposals as {self.texts[0].prompt}")
        return self

    @classmethod
    def make(
        cls,
        settings: PredictionSettings,
        rows: Sequence[Completion],
        predictor: Predictor,
        on_prompt: Callable[[int], None] = lambda _: None,
    ) -> "PredictionFile":
        """Predict every text, and report how many prompts, each with all its turns, were begun."""
        texts: list[PredictedText] = []
        begun: set[str] = set()
        for row in rows:
            begun.add(row.id.rpartition("#")[0])
            on_prompt(len(begun) - 1)
            found = predictor.predict_cuts(row, settings.draft_temperatures)
            whole = {rule: [astuple(sums) for sums in each.whole] for rule, each in found.items()}
            cut = {rule: [astuple(sums) for sums in each.by_proposals] for rule, each in found.items()}
            texts.append(PredictedText(prompt=row.id.rpartition("#")[0], rounds=whole, by_proposals=cut))
        return cls(settings=settings, texts=texts)

    @classmethod
    def is_made(cls, file: Path, settings: PredictionSettings) -> bool:
        """Return whether a file holds the predictions that these settings ask for."""
        return os.path.lexists(file) and read_evaluation_file(file, cls).settings == settings


def _sizes(values: Mapping[Rule, Sequence[object]]) -> dict[Rule, int]:
    return {rule: len(each) for rule, each in values.items()}


class Predictions:
    """Looks up the expected rounds of every prompt, all its turns together, by rule and draft temperature."""

    def __init__(self, files: Sequence[Path], protocol: Protocol) -> None:
        self.protocol = protocol
        self._sums: dict[tuple[str, Rule, float], RoundSums] = {}
        self._cut: dict[tuple[str, Rule], list[RoundSums]] = {}
        for file in files:
            made = read_evaluation_file(file, PredictionFile)
            for text in made.texts:
                for rule, values in text.rounds.items():
                    given = made.settings.draft_temperatures[rule]
                    for draft_temperature, (num, tokens) in zip(given, values, strict=True):
                        key = (text.prompt, rule, draft_temperature)
                        self._sums[key] = self._sums.get(key, RoundSums()) + RoundSums(num, tokens)
                for rule, values in text.by_proposals.items():
                    before = self._cut.get((text.prompt, rule), [RoundSums()] * len(values))
                    self._cut[text.prompt, rule] = [a + RoundSums(*b) for a, b in zip(before, values, strict=True)]

    def of(self, task: Task, rule: Rule, draft_temperature: float) -> tuple[list[float], list[float]]:
        """Return the expected tokens and rounds of every prompt of a task."""
        try:
            found = [self._sums[prompt.id, rule, draft_temperature] for prompt in task.prompts]
        except KeyError as error:
            raise EvaluationError(
                f"the predictions lack {error.args[0][0]}; delete the folder predictions and run the same command again"
            ) from error
        return [each.tokens for each in found], [each.num for each in found]

    def lengths_by_proposals(self, tasks: Sequence[Task]) -> dict[Rule, list[float]]:
        """Return by rule the predicted tokens per call of blocks cut to 1, 2, .. B proposals, as means over the tasks.

        The draft temperature is the paper's: the target's own, or argmax drafts under greedy verification.
        """
        found: dict[Rule, list[float]] = {}
        for rule in self.protocol.rules:
            by_task = []
            for task in tasks:
                rounds = [self._cut[prompt.id, rule] for prompt in task.prompts]
                sums = [sum(each, RoundSums()) for each in zip(*rounds, strict=True)]
                by_task.append([each.tokens / each.num if each.num else 0.0 for each in sums])
            found[rule] = np.mean(by_task, 0).tolist()
        return found

    def temperatures(self, tasks: Sequence[Task]) -> list[TemperaturePoint]:
        """Return the predicted acceptance lengths over the grid, as means over the tasks."""
        points = []
        for temperature in self.protocol.grid if self.protocol.sampled_rules else ():
            lengths = {}
            for rule in self.protocol.sampled_rules:
                pooled = [self.of(task, rule, temperature) for task in tasks]
                lengths[str(rule)] = float(np.mean([sum(t) / sum(r) if sum(r) else 0.0 for t, r in pooled]))
            points.append(TemperaturePoint(draft_temperature=temperature, acceptance_length=lengths))
        return points
