"""Put drafters to work, and record what happens: whole conversations, single answers, fixed blocks of training texts.

`converse` answers every turn, as conversations of the training data are held. `trace_answer` decodes one answer and
keeps what the verifier saw, round by round, for the block explorer. `training_dynamics` measures every epoch's
checkpoint on the same full blocks of training texts (the paper's figure 4): accuracy is argmax agreement with the
stored tokens, and the length is that of one draw per block, where the drafter samples, the target reads what was
sampled, and block verification decides.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from blockdraft.data import Conversation, GenerationSettings, Prompt, TextAnchors, TextDataset, collate
from blockdraft.decoding import AdaptiveProposals, Generation, RoundCosts, generate
from blockdraft.decoding.generation import OnVerdict
from blockdraft.drafters import Drafter, Proposal, load_drafter
from blockdraft.evaluation.protocol import DecodingSetup
from blockdraft.evaluation.results import (
    AnswerTrace,
    Dynamics,
    DynamicsPoint,
    EvaluationError,
    TracedRound,
    TracedToken,
)
from blockdraft.runs import Run
from blockdraft.targets import Sampling, Target
from blockdraft.verification import Verdict, verify
from blockdraft.verification.rules import acceptance_states, probability_ratio

STREAM = "evaluate"
"""The random stream of decoding, which is not that of the target's own texts."""

DYNAMICS = 5
"""This number tells the random stream from those of the data."""

CONTEXTS_SEED = 0
"""The paper's seed for the contexts of the training dynamics; whatever the seed of training, they are the same."""

TokenNumbers = dict[str, float]
TAIL = 8
"""The number of tokens before a piece of text that decide how it is decoded."""
INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def converse(
    target: Target,
    drafter: Drafter | None,
    prompt: Prompt,
    setup: DecodingSetup,
    *,
    temperature: float,
    max_new_tokens: int,
    max_length: int,
    seed: int,
    costs: RoundCosts | None = None,
    on_verdict: OnVerdict | None = None,
    on_turn: Callable[[Generation], None] | None = None,
) -> list[Generation]:
    """Answer every turn, and return the answers; a turn whose whole budget does not fit ends the conversation.

    Args:
        target, drafter: the models; no drafter is autoregressive decoding.
        prompt: the user's messages.
        setup: the rule and the draft temperature.
        temperature: the target's temperature.
        max_new_tokens: the budget of each answer.
        max_length: the longest prompt and answer together.
        seed: the seed of all draws; each turn has a stream of its own.
        costs: of rounds, if the number of proposals is to follow what the rounds of each answer kept.
        on_verdict: called in each round of each answer, as by `generate`.
        on_turn: called with each answer.
    """
    settings = GenerationSettings(Sampling(temperature), max_new_tokens, max_length, seed, whole_turns=True)
    conversation = Conversation(prompt, target, settings, stream=STREAM)
    answers: list[Generation] = []
    while (request := conversation.request) is not None:
        answer = generate(
            target, drafter, request.prompt_ids, rule=setup.rule,
            temperature=None if setup.rule == "greedy" else temperature, draft_temperature=setup.draft_temperature,
            max_new_tokens=request.max_new_tokens, seed=request.seed, on_verdict=on_verdict,
            num_proposals=None if costs is None else AdaptiveProposals(costs),
        )  # fmt: skip
        if on_turn is not None:
            on_turn(answer)
        answers.append(answer)
        conversation.answer(answer.tokens)
    return answers


def trace_answer(
    target: Target,
    drafter: Drafter,
    prompt: Prompt,
    setup: DecodingSetup,
    *,
    temperature: float,
    max_new_tokens: int,
    max_length: int,
    seed: int,
) -> AnswerTrace:
    """Decode the first answer to a prompt, and return what the verifier saw."""
    verdicts: list[tuple[list[TokenNumbers], int]] = []
    done: list[Generation] = []

    def keep(proposal: Proposal, target_probs: Tensor, verdict: Verdict) -> None:
        verdicts.append(_look(proposal, target_probs, verdict))

    converse(
        target, drafter, Prompt(prompt.id, prompt.turns[:1], prompt.system, prompt.source), setup,
        temperature=temperature, max_new_tokens=max_new_tokens, max_length=max_length, seed=seed, on_verdict=keep,
        on_turn=done.append,
    )  # fmt: skip
    generation = done[0]
    rounds, written = [], generation.tokens[:1]
    for record, (numbers, token_accepted) in zip(generation.rounds, verdicts, strict=True):
        columns = zip(record.drafted, _texts(target, written, record.drafted), numbers, strict=True)
        kept = [*written, *record.drafted[: record.accepted]]
        following = None if record.next_token is None else _texts(target, kept, [record.next_token])[0]
        traced = TracedRound(
            anchor=_texts(target, written[:-1], written[-1:])[0],
            drafted=[TracedToken(id=token, text=text, **each) for token, text, each in columns],
            accepted=record.accepted, token_accepted=token_accepted, next_id=record.next_token, next_text=following,
        )  # fmt: skip
        rounds.append(traced)
        written = [*written, *record.tokens]
    assert setup.drafter is not None
    return AnswerTrace(
        drafter=setup.drafter, rule=setup.rule, draft_temperature=setup.draft_temperature,
        first_text=_texts(target, [], generation.tokens[:1])[0], rounds=rounds,
    )  # fmt: skip


def _look(proposal: Proposal, target_probs: Tensor, verdict: Verdict) -> tuple[list[TokenNumbers], int]:
    """Return the numbers of the drafted tokens, and how many of them token verification would have kept."""
    p, q, tokens = target_probs[:, :-1].float(), proposal.probs.float(), proposal.tokens
    ratio = probability_ratio(p, q, tokens)
    states = acceptance_states(ratio)[0, 1:]
    at = tokens.unsqueeze(-1)
    columns = {
        "p": p.gather(-1, at)[0, :, 0], "q": q.gather(-1, at)[0, :, 0], "alpha": states,
        "threshold": verdict.thresholds[0], "coin": verdict.coins[0], "token_threshold": ratio.clamp(max=1)[0],
    }  # fmt: skip
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    kept = (verdict.coins[0] < ratio[0].clamp(max=1)).long().cumprod(0).sum()
    return [dict(zip(columns, row, strict=True)) for row in rows], int(kept)


def _texts(target: Target, before: list[int], tokens: list[int]) -> list[str]:
    """Return what each token adds to the text; pieces of a character add nothing until its last one is there."""
    tail = before[-TAIL:]
    shown, texts = "", []
    for length in range(1, len(tail) + len(tokens) + 1):
        text = target.decode([*tail, *tokens][:length], skip_special_tokens=False)
        finished = not text.endswith(INCOMPLETE_CHARACTER)
        texts.append(text[len(shown) :] if finished else "")
        shown = text if finished else shown
    return texts[len(tail) :]


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


def training_dynamics(
    name: str, run: Run, target: Target, *, num_texts: int, blocks_per_text: int, seed: int
) -> Dynamics:
    """Measure every epoch's checkpoint of one run; the seed is that of drafts and verdicts."""
    training, _heldout = run.splits(target)
    chosen = fixed_blocks(training, num_texts, blocks_per_text, run.recipe.drafter.num_proposals, CONTEXTS_SEED)
    points = []
    for step, folder in run.epoch_checkpoints().items():
        drafter = load_drafter(folder, target).to(target.device, target.dtype).eval()
        accuracy, length = measure_checkpoint(target, drafter, training, chosen, seed)
        points.append(
            DynamicsPoint(step=step, epoch=step / run.info.steps_per_epoch, accuracy=accuracy, draft_length=length)
        )
    return Dynamics(drafter=name, num_texts=num_texts, num_blocks=num_texts * blocks_per_text, points=points)
