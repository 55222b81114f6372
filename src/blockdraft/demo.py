"""Show the product at work: from nothing to a report in one folder, or a few prompts answered in seconds.

`Demo` makes data, trains two drafters and evaluates them beside the shipped ones. Every stage is an ordinary step of
the product, and resumes where it stopped. `answer_twice` answers prompts with a shipped drafter and without, in turns.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from blockdraft.data import (
    GenerationSettings,
    build_cache,
    open_dataset,
    read_prompts,
    regenerate,
    write_prompts,
)
from blockdraft.data.selection import pocket_prompts, select_generated
from blockdraft.decoding import AdaptiveProposals, Generation, Round, RoundCosts, generate
from blockdraft.distributed import choose_device
from blockdraft.drafters import Drafter, DrafterConfig
from blockdraft.errors import BlockdraftError
from blockdraft.evaluation import (
    Evaluation,
    Protocol,
    Results,
    ShippedDrafter,
    load_candidates,
    load_tasks,
    shipped_drafters,
)
from blockdraft.evaluation.evaluation import OnProgress
from blockdraft.pocket import FAMILIES, heldout
from blockdraft.recipes import load_recipe
from blockdraft.reports import ReportFiles, write_report
from blockdraft.runs import Run
from blockdraft.targets import Target, load_target

KIND = "dflash"
OBJECTIVES = ("ce", "bv")


@dataclass(frozen=True)
class Size:
    """Says how much of everything there is for one target; all else stands in the shipped recipes.

    minutes: about how long it takes on two cores, in words.
    num_prompts, max_new_tokens: of the training data.
    eval_prompts: of each task, for predicted lengths. decoded_prompts: of these, for measured lengths and speed-ups.
    eval_tokens: of an answer. draft_temperatures: where the best one is sought, beside 1.
    dynamics_texts: training texts for the figure of training dynamics.
    threads: of the stages that run by themselves; None for all. Small models gain little from more than one, and lose
        much where another process takes a core.
    changes: to the shipped recipe.
    """

    minutes: str
    num_prompts: int
    max_new_tokens: int
    eval_prompts: int
    decoded_prompts: int
    eval_tokens: int
    draft_temperatures: tuple[float, ...]
    dynamics_texts: int
    threads: int | None = None
    changes: tuple[str, ...] = ()


SIZES = {
    #               minutes    prompts tokens  eval decoded tokens  temperatures  dynamics
    "pocket": Size("fifteen",     2400,   256,   32,      5,   128, (0.6, 0.8, 1.0), 24, threads=1),
    "smollm2": Size("ninety",      400,   128,    6,      3,    64, (0.6, 0.8, 1.0), 4, changes=(
        "data.num_heldout=40", "batch.num_texts=8", "batch.num_anchors=128", "logging.heldout_blocks=256",
        "logging.logging_steps=1",
    )),
}  # fmt: skip


class DemoError(BlockdraftError):
    """A stage has failed, and the message says where to look."""


class Demo:
    """Runs one demonstration in its folder."""

    def __init__(
        self,
        target: str,
        out: str | Path,
        on_progress: OnProgress,
        *,
        device: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.name, self.size, self.out, self.on_progress = target, SIZES[target], Path(out), on_progress
        self.device, self.dtype = choose_device(device), dtype

    def run(self) -> tuple[Results, ReportFiles]:
        """Run all stages, and return what was found and the report of it."""
        self.out.mkdir(parents=True, exist_ok=True)
        if self.size.threads is not None:
            torch.set_num_threads(self.size.threads)
        target = load_target(self.name, device=self.device, dtype=self.dtype)
        self._data(target)
        self._features(target)
        self._train()
        results = self._evaluate(target)
        return results, write_report([self.out / "evaluation"], self.out / "report")

    @property
    def runs(self) -> dict[str, Path]:
        """Give the folders of the two runs, by objective."""
        return {name: self.out / "runs" / name for name in OBJECTIVES}

    def _recipe(self, name: str) -> tuple[str, list[str]]:
        cached = ["data.features=cached", f"data.cache={self.out / 'features'}"]
        kept = ["logging.keep_epoch_checkpoints=true", "logging.tensorboard=false", f"runtime.device={self.device}"]
        if self.dtype is not None:
            kept.append(f"target.dtype={str(self.dtype).removeprefix('torch.')}")
        return f"{self.name}-{KIND}-{name}", [f"data.path={self.out / 'data'}", *cached, *kept, *self.size.changes]

    def _data(self, target: Target) -> None:
        """Let the target answer prompts of pocket's corpus."""
        file = self.out / "prompts.jsonl"
        if not file.exists():
            write_prompts({file: select_generated(pocket_prompts(seed=0), num=self.size.num_prompts).kept})
        settings = GenerationSettings(max_new_tokens=self.size.max_new_tokens, max_length=768)
        done = 0

        def count(conversations: int, tokens: int, new: bool) -> None:
            nonlocal done
            done += conversations
            self.on_progress("data: the target answers", done, self.size.num_prompts, tokens if new else 0)

        regenerate(read_prompts(file), target, settings, self.out / "data", shard_size=200, on_progress=count)

    def _features(self, target: Target) -> None:
        """Compute what the drafters read of the target, once for both."""
        recipe = load_recipe(*self._recipe(OBJECTIVES[0]))
        config = DrafterConfig.for_target(recipe.drafter.kind, target, **recipe.drafter.config_options())
        dataset = open_dataset(self.out / "data", target)
        of, done = len(dataset.tokens), 0

        def count(tokens: int) -> None:
            nonlocal done
            done += tokens
            self.on_progress("features of the target", done, of, tokens)

        build_cache(
            self.out / "features", target, dataset, config.target_layers,
            max_bytes=int(recipe.data.cache_gib * 2**30), on_tokens=count,
            normalizer_temperature=None if recipe.drafter.vocab_size is None else recipe.make_objective().temperature,
        )  # fmt: skip
        self.on_progress("features of the target", of, of, 0)

    def _train(self) -> None:
        """Train both drafters side by side, each on half of the cores: small steps gain little from more."""
        threads = max(1, (os.cpu_count() or 1) // len(OBJECTIVES))
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        children: dict[str, subprocess.Popen[bytes]] = {}
        logs = {name: self.out / "runs" / f"{name}.log" for name in OBJECTIVES}
        (self.out / "runs").mkdir(exist_ok=True)
        try:
            for name in OBJECTIVES:
                recipe, changes = self._recipe(name)
                command = [sys.executable, "-m", "blockdraft", "train", recipe, *changes, "--out", str(self.runs[name])]
                with logs[name].open("ab") as log:
                    children[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            while any(child.poll() is None for child in children.values()):
                if any(child.returncode not in (None, 0) for child in children.values()):
                    break
                self._show_training()
                time.sleep(1)
        finally:
            for child in children.values():
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM)  # it saves, and the next call resumes
            for child in children.values():
                child.wait()
        self._show_training()
        for name, child in children.items():
            if child.returncode not in (0, 143):  # 143: told to stop because the other one failed
                last = logs[name].read_text(errors="replace").strip().splitlines()[-1:]
                raise DemoError(f"training {name} failed: {' '.join(last)} (all of it: {logs[name]})")
        if any(child.returncode for child in children.values()):
            raise DemoError("training was told to stop; the same command resumes")

    def _show_training(self) -> None:
        """Show the steps of each run, as far as its metrics tell."""
        for name, folder in self.runs.items():
            with suppress(BlockdraftError, OSError, IndexError):  # not there yet, or damaged, as the training will say
                run = Run.open(folder)
                self.on_progress(f"training with {name.upper()}", run.metrics()[-1]["step"], run.info.num_steps, 0)

    def _evaluate(self, target: Target) -> Results:
        """Measure both drafters, and beside them the shipped ones that were trained with BV for longer."""
        size = self.size
        protocol = Protocol(
            max_new_tokens=size.eval_tokens, num_decoded=size.decoded_prompts, dynamics_texts=size.dynamics_texts,
            draft_temperatures=size.draft_temperatures,
        )  # fmt: skip
        tasks = load_tasks(["pocket"], num_prompts=size.eval_prompts)
        trained = [f"{name}={folder / 'checkpoint'}" for name, folder in self.runs.items()]
        candidates = load_candidates([*trained, *self.shipped], target)
        out = self.out / "evaluation"
        return Evaluation(target, candidates, tasks, protocol, out, on_progress=self.on_progress).run()

    @property
    def shipped(self) -> list[str]:
        """Give the names of the shipped drafters for this target that were trained with BV from the start."""
        found = [each for each in shipped_drafters() if each.target == self.name]
        return [each.name for each in found if each.name == f"{self.name}-{each.recipe.drafter.kind}-bv"]


QUICK_WARM_UP_TOKENS = 8
QUICK_TEMPERATURE = 0.7
"""The temperature of the quick demonstration, a usual one for chats: at 1, a model as small as pocket goes astray."""

QUESTIONS = (
    "What is a river?",
    "Write a Python function that returns the largest number of a list.",
    "A train leaves at 9 and arrives at 11:30. How long does it travel?",
)
"""Any instruction-tuned target can answer these; pocket is asked some of its held-out prompts instead."""


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
    return pooled_speed([each.drafted for each in answers]) / pooled_speed([each.alone for each in answers])


def pooled_speed(answers: Sequence[Generation]) -> float:
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
    """Answer every prompt with the drafter and alone, at `QUICK_TEMPERATURE` under block verification.

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
        generate(
            target, small, prompts[0], temperature=QUICK_TEMPERATURE, max_new_tokens=QUICK_WARM_UP_TOKENS, seed=seed
        )
    answers = []
    for number, prompt in enumerate(prompts):
        if on_prompt is not None:
            on_prompt(prompt)
        drafted = generate(
            target, drafter, prompt, temperature=QUICK_TEMPERATURE, draft_temperature=draft_temperature,
            max_new_tokens=max_new_tokens, seed=seed + number, on_round=on_round,
            num_proposals=None if costs is None else AdaptiveProposals(costs),
        )  # fmt: skip
        alone = generate(
            target, None, prompt, temperature=QUICK_TEMPERATURE, max_new_tokens=max_new_tokens, seed=seed + number
        )
        answers.append(QuickAnswer(prompt, drafted, alone))
        if on_answer is not None:
            on_answer(answers[-1])
    return answers
