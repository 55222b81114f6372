"""What the verifier saw, round by round: the data of the block explorer."""

from torch import Tensor

from blockdraft.data import Prompt
from blockdraft.decoding import Generation
from blockdraft.drafters import Drafter, Proposal
from blockdraft.evaluation.conversation import Way, converse
from blockdraft.evaluation.results import Trace, TracedRound, TracedToken
from blockdraft.targets import Target
from blockdraft.verification import Verdict
from blockdraft.verification.rules import acceptance_states, probability_ratio


def trace(
    target: Target, drafter: Drafter, prompt: Prompt, way: Way, *, temperature: float, max_new_tokens: int, seed: int
) -> Trace | None:
    """The first answer to a prompt; None if it does not fit into the target."""
    verdicts: list[tuple[list[TracedToken], int]] = []
    done: list[Generation] = []

    def keep(proposal: Proposal, target_probs: Tensor, verdict: Verdict) -> None:
        verdicts.append(_look(target, proposal, target_probs, verdict))

    converse(
        target, drafter, Prompt(prompt.id, prompt.turns[:1], prompt.system, prompt.source), way,
        temperature=temperature, max_new_tokens=max_new_tokens, seed=seed, on_verdict=keep, on_turn=done.append,
    )  # fmt: skip
    if not done:
        return None
    generation = done[0]
    rounds, at = [], 0
    for record, (tokens, token_accepted) in zip(generation.rounds, verdicts, strict=True):
        next_text = None if record.next_token is None else _text(target, record.next_token)
        traced = TracedRound(
            anchor=_text(target, generation.tokens[at]), drafted=tokens, accepted=record.accepted,
            token_accepted=token_accepted, next_id=record.next_token, next_text=next_text,
        )  # fmt: skip
        rounds.append(traced)
        at += len(record.tokens)
    assert way.drafter is not None
    return Trace(
        drafter=way.drafter, rule=way.rule, draft_temperature=way.draft_temperature,
        first_text=_text(target, generation.tokens[0]), rounds=rounds,
    )  # fmt: skip


def _look(target: Target, proposal: Proposal, target_probs: Tensor, verdict: Verdict) -> tuple[list[TracedToken], int]:
    """The drafted tokens, and how many of them token verification would have kept."""
    p, q, tokens = target_probs[:, :-1].float(), proposal.probs.float(), proposal.tokens
    ratio = probability_ratio(p, q, tokens)
    states = acceptance_states(ratio)[0, 1:]
    at = tokens.unsqueeze(-1)
    columns = zip(
        tokens[0].tolist(), p.gather(-1, at)[0, :, 0].tolist(), q.gather(-1, at)[0, :, 0].tolist(), states.tolist(),
        verdict.thresholds[0].tolist(), verdict.coins[0].tolist(), ratio.clamp(max=1)[0].tolist(), strict=True,
    )  # fmt: skip
    drafted = [
        TracedToken(
            id=token, text=_text(target, token), p=p_x, q=q_x, alpha=alpha, threshold=threshold, coin=coin,
            token_threshold=token_threshold,
        )
        for token, p_x, q_x, alpha, threshold, coin, token_threshold in columns
    ]  # fmt: skip
    kept = (verdict.coins[0] < ratio[0].clamp(max=1)).long().cumprod(0).sum()
    return drafted, int(kept)


def _text(target: Target, token: int) -> str:
    return target.decode([token], skip_special_tokens=False)
