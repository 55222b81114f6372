"""Measure the checkpoint of every epoch on the same full blocks of training texts: the paper's figure 4.

Accuracy is argmax agreement with the stored tokens. The length is that of one draw per block, where the drafter
samples, the target reads what was sampled, and block verification decides.

The checkpoints are shared out over the processes. What one of them measured is kept in ``dynamics/NAME-STEP.json``.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from blockdraft.data import TextAnchors, TextDataset, collate
from blockdraft.distributed import Distributed
from blockdraft.drafters import Drafter, load_drafter
from blockdraft.drafters.checkpoint import WEIGHTS
from blockdraft.errors import BlockdraftError
from blockdraft.evaluation.candidates import Candidate
from blockdraft.evaluation.protocol import Protocol
from blockdraft.evaluation.results import (
    Dynamics,
    DynamicsPoint,
    EvaluationError,
    Strict,
    read_evaluation_file,
    write_model,
)
from blockdraft.files import sha256
from blockdraft.runs import Run
from blockdraft.targets import Sampling, Target
from blockdraft.verification import verify

STREAM = 5
"""This number tells the random stream of the contexts from those of the data."""

CONTEXTS_SEED = 0
"""The paper's seed for the contexts, whatever the seed of the evaluation. They are drawn from the texts that a run was
trained on, so runs share them if they trained on the same texts: the same data, held-out texts and seed."""

NO_EPOCHS = "its run did not keep the checkpoint of every epoch; train with logging.keep_epoch_checkpoints=true"
NO_EPOCH_YET = "its run has not come to the end of an epoch"


def fixed_blocks(
    texts: TextDataset, num_texts: int, blocks_per_text: int, num_proposals: int, seed: int
) -> list[TextAnchors]:
    """Choose the same full blocks of the same texts for every checkpoint and every drafter of this size.

    A text qualifies if it has ``blocks_per_text`` different anchors with ``num_proposals`` tokens of the response after
    each. If fewer than ``num_texts`` do, there is no figure: an average over shorter blocks would be another quantity.
    """
    rng = np.random.default_rng([seed, STREAM])
    room = texts.response_lengths - num_proposals  # anchors with a full block behind them
    able = np.flatnonzero(room >= blocks_per_text)
    if len(able) < num_texts:
        raise EvaluationError(
            f"{len(able):,} of {len(texts):,} training texts have {blocks_per_text} full blocks of {num_proposals} "
            f"tokens, and {num_texts:,} are asked for; "
            + (f"--dynamics-texts {len(able)} takes all of them" if len(able) else "--dynamics-texts 0 leaves it out")
        )
    chosen = np.sort(rng.choice(able, size=num_texts, replace=False))
    return [
        TextAnchors(
            int(text),
            texts.prompt_lengths[text] + np.sort(rng.choice(room[text], size=blocks_per_text, replace=False)),
        )
        for text in chosen
    ]


@torch.no_grad()
def measure_checkpoint(
    target: Target, drafter: Drafter, texts: TextDataset, chosen: list[TextAnchors], seed: int
) -> tuple[float, float]:
    """Return the accuracy, and the mean accepted draft tokens of one draw per block."""
    sampling = Sampling()
    draft, coins, recovery = (torch.Generator(target.device).manual_seed(seed + i) for i in range(3))
    correct = positions = accepted = blocks = 0
    for each in chosen:
        batch = collate([each], texts, drafter.config.num_proposals).to(target.device)
        cache = target.new_cache(batch.tokens.shape[1] + drafter.config.num_proposals + 1)
        output = target.forward(batch.tokens, cache, drafter.config.target_layers)
        assert output.features is not None
        features = output.features.to(drafter.fc.weight.dtype)
        hidden = drafter(features, batch.anchor_tokens, batch.anchors, target)
        logits = drafter.logits(hidden, batch.previous, target)
        correct += int(((logits.argmax(-1) == batch.labels) & batch.valid).sum())
        positions += int(batch.valid.sum())
        for anchor in sorted(each.anchors.tolist(), reverse=True):  # each one forgets what the later ones wrote
            drafts = drafter.new_cache(anchor)
            drafter.extend(drafts, output.features[:, :anchor])
            proposal = drafter.propose(drafts, int(batch.tokens[0, anchor]), target, 1.0, draft).until(target.eos_ids)
            cache.rollback(anchor)
            tokens = torch.cat([batch.tokens[:, anchor : anchor + 1], proposal.tokens], 1)
            probs = sampling.probs(target.logits(target.forward(tokens, cache).hidden))
            verdict = verify("block", probs, proposal.probs, proposal.tokens, None, coins, recovery)
            accepted += int(verdict.num_accepted)
            blocks += 1
    return correct / max(1, positions), accepted / max(1, blocks)


class CheckpointSettings(Strict):
    """States everything that decides what is measured of a checkpoint, beside the target.

    weights: SHA-256 of the checkpoint's weights. data, num_heldout, split_seed: which texts it was trained on.
    num_texts, blocks_per_text, num_proposals: which blocks of them. seed: that of drafts and verdicts.
    """

    weights: str
    data: str
    num_heldout: int
    split_seed: int
    num_texts: int
    blocks_per_text: int
    num_proposals: int
    seed: int


class CheckpointFile(Strict):
    """Holds what was measured of one checkpoint: ``dynamics/*.json``."""

    format: Literal["blockdraft.dynamics/1"] = "blockdraft.dynamics/1"
    settings: CheckpointSettings
    point: DynamicsPoint


class RunDynamics:
    """Measures the checkpoints of one run, and reads what was measured before."""

    def __init__(self, name: str, run: Run, target: Target, protocol: Protocol, folder: Path) -> None:
        self.name, self.run, self.target, self.protocol, self.folder = name, run, target, protocol, folder
        kept = run.recipe.logging.keep_epoch_checkpoints
        found = run.epoch_checkpoints() if kept else {}
        self.obstacle = _missing_epochs(run, found) if kept else NO_EPOCHS
        self.checkpoints = found if self.obstacle is None else {}

    def measure(self, steps: Iterable[int]) -> Iterator[DynamicsPoint]:
        """Yield what was measured of these checkpoints; texts are opened only if there is something left to measure."""
        contexts = None
        for step in steps:
            file, settings = self.folder / f"{self.name}-{step:08d}.json", self._settings(step)
            found = read_evaluation_file(file, CheckpointFile) if os.path.lexists(file) else None
            if found is None or found.settings != settings:
                contexts = contexts or self._choose_contexts()
                found = CheckpointFile(settings=settings, point=self._measure(step, *contexts))
                write_model(found, file)
            yield found.point

    def summary(self, points: Sequence[DynamicsPoint]) -> Dynamics:
        """Put the points of all checkpoints together."""
        num_texts, each = self.protocol.dynamics_texts, self.protocol.dynamics_blocks
        ordered = sorted(points, key=lambda point: point.step)
        return Dynamics(drafter=self.name, num_texts=num_texts, num_blocks=num_texts * each, points=ordered)

    def _settings(self, step: int) -> CheckpointSettings:
        recipe, protocol, weights = self.run.recipe, self.protocol, self.checkpoints[step] / WEIGHTS
        if not weights.is_file():
            raise EvaluationError(f"{weights.parent} has no {WEIGHTS}; put the file back")
        return CheckpointSettings(
            weights=sha256(weights), data=self.run.info.data,
            num_heldout=recipe.data.num_heldout, split_seed=recipe.seed, num_texts=protocol.dynamics_texts,
            blocks_per_text=protocol.dynamics_blocks, num_proposals=recipe.drafter.num_proposals, seed=protocol.seed,
        )  # fmt: skip

    def _measure(self, step: int, texts: TextDataset, chosen: list[TextAnchors]) -> DynamicsPoint:
        drafter = load_drafter(self.checkpoints[step], self.target).to(self.target.device, self.target.dtype).eval()
        accuracy, length = measure_checkpoint(self.target, drafter, texts, chosen, self.protocol.seed)
        epoch = step / self.run.info.steps_per_epoch
        return DynamicsPoint(step=step, epoch=epoch, accuracy=accuracy, draft_length=length)

    def _choose_contexts(self) -> tuple[TextDataset, list[TextAnchors]]:
        training, _heldout = self.run.splits(self.target)
        protocol, num_proposals = self.protocol, self.run.recipe.drafter.num_proposals
        return training, fixed_blocks(
            training, protocol.dynamics_texts, protocol.dynamics_blocks, num_proposals, CONTEXTS_SEED
        )


def _missing_epochs(run: Run, found: Mapping[int, Path]) -> str | None:
    """Say which epochs before a run's newest checkpoint have none any more, or that none has ended."""
    each = run.info.steps_per_epoch
    gone = [str(step // each) for step in range(each, max(run.checkpoints()), each) if step not in found]
    if gone:
        return f"its run has no checkpoint of epoch {', '.join(gone)} any more; put it back, or train again"
    return None if found else NO_EPOCH_YET


def training_dynamics(
    candidates: Sequence[Candidate],
    target: Target,
    protocol: Protocol,
    folder: Path,
    distributed: Distributed,
    on_checkpoint: Callable[[int, int], None] = lambda _done, _of: None,
) -> tuple[list[Dynamics], dict[str, str]]:
    """Measure the runs of the candidates, and return their dynamics and, by drafter, what stands in the way of others.

    Every process must call this, and all return the same. A drafter outside a run has no dynamics, and no obstacle.

    Args:
        candidates: the drafters.
        target: the model that they draft for.
        protocol: how many texts and blocks, and the seed; without texts nothing is measured.
        folder: where what was measured is kept.
        distributed: the processes that share the checkpoints out.
        on_checkpoint: called with the number of checkpoints that this process has done, and of all that it does.
    """
    asked = candidates if protocol.dynamics_texts else []
    runs = [RunDynamics(c.name, c.run, target, protocol, folder) for c in asked if c.run is not None]
    mine = [(run, step) for run in runs for step in run.checkpoints][distributed.rank :: distributed.world_size]
    points: list[tuple[str, DynamicsPoint]] = []
    obstacles = {run.name: run.obstacle for run in runs if run.obstacle is not None}
    if mine:
        on_checkpoint(0, len(mine))
    for run in runs:
        try:
            for point in run.measure(step for each, step in mine if each is run):
                points.append((run.name, point))
                on_checkpoint(len(points), len(mine))
        except BlockdraftError as error:
            obstacles[run.name] = str(error)
    everywhere = distributed.all_gather((points, obstacles))
    obstacles = {name: reason for _, found in reversed(everywhere) for name, reason in found.items()}
    measured = [
        run.summary([point for found, _ in everywhere for name, point in found if name == run.name])
        for run in runs
        if run.name not in obstacles
    ]
    return measured, {run.name: obstacles[run.name] for run in runs if run.name in obstacles}
