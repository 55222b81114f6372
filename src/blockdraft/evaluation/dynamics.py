"""Training dynamics: every epoch's checkpoint on the same full blocks of training texts (the paper's figure 4).

Accuracy is argmax agreement with the stored tokens. The length is that of one draw per block: the drafter samples,
the target reads what was sampled, block verification decides.
"""

import numpy as np
import torch

from blockdraft.data import TextAnchors, TextDataset, collate
from blockdraft.drafters import Drafter, load_drafter
from blockdraft.evaluation.results import Dynamics, DynamicsPoint, EvaluationError
from blockdraft.runs import Run
from blockdraft.targets import Sampling, Target
from blockdraft.verification import verify

DYNAMICS = 5
"""What this random stream is for, beside those of the data."""


def fixed_blocks(
    texts: TextDataset, num_texts: int, blocks_per_text: int, num_proposals: int, seed: int
) -> list[TextAnchors]:
    """Choose the same full blocks of the same texts for every checkpoint and every drafter of this size.

    A text qualifies if it has ``blocks_per_text`` different anchors with ``num_proposals`` tokens of the response after
    each. If fewer than ``num_texts`` do, there is no figure: an average over shorter blocks would be another quantity.
    """
    rng = np.random.default_rng([seed, DYNAMICS])
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
def measure(
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


def training_dynamics(
    name: str, run: Run, target: Target, *, num_texts: int, blocks_per_text: int, seed: int
) -> Dynamics:
    """Measure every epoch's checkpoint of one run."""
    training, _heldout = run.splits(target)
    chosen = fixed_blocks(training, num_texts, blocks_per_text, run.recipe.drafter.num_proposals, seed)
    points = []
    for step, folder in run.epoch_checkpoints().items():
        drafter = load_drafter(folder, target).to(target.device, target.dtype).eval()
        accuracy, length = measure(target, drafter, training, chosen, seed)
        points.append(
            DynamicsPoint(step=step, epoch=step / run.info.steps_per_epoch, accuracy=accuracy, draft_length=length)
        )
    return Dynamics(drafter=name, num_texts=num_texts, num_blocks=num_texts * blocks_per_text, points=points)
