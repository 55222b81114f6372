"""Speculation at work in seconds: a few prompts, answered with a shipped drafter and without, one after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockdraft.decoding import AdaptiveProposals, Generation, Round, RoundCosts, generate
from blockdraft.drafters import Drafter
from blockdraft.errors import BlockdraftError
from blockdraft.evaluation.candidates import ShippedDrafter, shipped_drafters
from blockdraft.pocket import FAMILIES, heldout
from blockdraft.targets import Target

WARM_UP_TOKENS = 8
QUESTIONS = (
    "What is a river?",
    "Write a Python function that returns the largest number of a list.",
    "A train leaves at 9 and arrives at 11:30. How long does it travel?",
)
"""What any instruction-tuned target can answer; pocket is asked some of its held-out prompts instead."""


class NothingShippedError(BlockdraftError):
    """No drafter for the target comes with this installation, and the message says what to do."""


@dataclass(frozen=True)
class QuickAnswer:
    """Holds one prompt, answered twice: with the drafter, and by the target alone."""

    prompt: str
    drafted: Generation
    alone: Generation

    @property
    def speedup(self) -> float:
        """Give tokens per second with the drafter over those without; both times include reading the prompt."""
        return speedup([self])


def speedup(answers: Sequence[QuickAnswer]) -> float:
    """Return the pooled tokens per second with the drafter over those without."""
    return tokens_per_second([each.drafted for each in answers]) / tokens_per_second([each.alone for each in answers])


def tokens_per_second(answers: Sequence[Generation]) -> float:
    """Return the tokens of some generations, divided by the time that all of them took."""
    return sum(len(each.tokens) for each in answers) / sum(each.seconds for each in answers)


def tokens_per_call(answers: Sequence[Generation]) -> float:
    """Return the tokens that a verification call retained on average."""
    rounds = [each for answer in answers for each in answer.rounds]
    return sum(len(each.tokens) for each in rounds) / max(1, len(rounds))


def best_shipped(target: str) -> ShippedDrafter:
    """Return the shipped drafter of a target with the longest predicted length, drafts sampled, blocks verified.

    A measured speed-up has the luck of sampling and of the machine in it; the prediction has neither.
    """
    found = [each for each in shipped_drafters() if each.target == target]
    if not found:
        raise NothingShippedError(
            f"no drafter for {target} comes with this installation; train one (make demo, or blockdraft train) and "
            "give its folder with --drafter"
        )

    def length(record: ShippedDrafter) -> float:
        rows = [] if record.measured is None else [each for each in record.measured.lengths if each.rule == "block"]
        return max((each.predicted_length.value for each in rows if each.choice != "one-hot"), default=0.0)

    return max(found, key=length)


def quick_prompts(target: str, num_each: int = 1) -> list[str]:
    """Return prompts for a target: of each of pocket's families some held-out ones, and one that people ask."""
    if target != "pocket":
        return list(QUESTIONS)
    return [*(each.prompt for family in FAMILIES for each in heldout(family, num_each)), QUESTIONS[0]]


def answer_twice(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[str],
    *,
    costs: RoundCosts | None = None,
    draft_temperature: float | None = None,
    max_new_tokens: int = 128,
    seed: int = 0,
    on_prompt: Callable[[str], None] | None = None,
    on_round: Callable[[Round], None] | None = None,
    on_answer: Callable[[QuickAnswer], None] | None = None,
) -> list[QuickAnswer]:
    """Answer every prompt with the drafter and alone, at temperature 1 under block verification.

    The two take turns, prompt by prompt, so that whatever slows the machine slows both; neither is timed before it has
    run once.

    Args:
        target, drafter: the models.
        prompts: user messages.
        costs: of rounds on this machine; if given, the number of proposals adapts to each text.
        draft_temperature: of the drafter; the target's if not given.
        max_new_tokens: of each answer.
        seed: of the first answer; each further one has the next.
        on_prompt: called with each prompt before it is answered.
        on_round: called in every round with the drafter, as by `generate`.
        on_answer: called with each prompt's two answers.
    """
    for small in (drafter, None):
        generate(target, small, prompts[0], max_new_tokens=WARM_UP_TOKENS, seed=seed)
    answers = []
    for number, prompt in enumerate(prompts):
        if on_prompt is not None:
            on_prompt(prompt)
        drafted = generate(
            target, drafter, prompt, draft_temperature=draft_temperature, max_new_tokens=max_new_tokens,
            seed=seed + number, on_round=on_round,
            num_proposals=None if costs is None else AdaptiveProposals(costs),
        )  # fmt: skip
        alone = generate(target, None, prompt, max_new_tokens=max_new_tokens, seed=seed + number)
        answers.append(QuickAnswer(prompt, drafted, alone))
        if on_answer is not None:
            on_answer(answers[-1])
    return answers
