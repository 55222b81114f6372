"""Evaluations made up by formula, with traces that the real verification rules decided."""

from collections import defaultdict
from pathlib import Path

import torch

from blockdraft.evaluation.results import (
    AnswerTrace,
    Average,
    Cell,
    DrafterAbout,
    Dynamics,
    DynamicsPoint,
    HeldOutPoint,
    Interval,
    PairedRatio,
    Results,
    TaskAbout,
    TemperaturePoint,
    TracedPrompt,
    TracedRound,
    TracedToken,
    Traces,
    write_model,
)
from blockdraft.verification.rules import coins, drafted

HOSTILE = "</script><img src=x onerror=\"document.title='broken'\">"
BLOCK = 6
TASKS = [
    TaskAbout(name="sums", title="Sums", group="math", source="pocket", num_prompts=40, num_turns=40),
    TaskAbout(name="functions", title="Functions", group="code", source="pocket", num_prompts=30, num_turns=30),
    TaskAbout(name="talk_2", title="Talk & 100% chat", group="chat", source="pocket", num_prompts=20, num_turns=40),
]
LOSS = defaultdict(lambda: 0.2, {"CE": 0.0, "KL": 0.12, "BV w/o annealing": 0.5, "BV": 0.75})
RULE = {"greedy": 0.6, "token": -0.1, "block": 0.0}
TASK = {"sums": 0.5, "functions": 0.0, "talk_2": -0.75}


def tau(label: str, kind: str, rule: str, task: str, choice: str = "paper", shift: float = 0.0) -> float:
    """The acceptance length of a made-up drafter."""
    best = {"paper": 0.0, "best": 0.25, "one-hot": -0.2}[choice]
    return 3.0 + LOSS[label] + (0.5 if kind == "dspark" else 0.0) + RULE[rule] + TASK[task] + best + shift


def results(
    target: str = "pocket",
    drafters: tuple[tuple[str, str], ...] = (
        ("dflash", "CE"), ("dflash", "BV w/o annealing"), ("dflash", "BV"), ("dspark", "CE"), ("dspark", "BV"),
    ),
    *,
    shift: float = 0.0,
    rules: tuple[str, ...] = ("greedy", "token", "block"),
    with_dynamics: bool = True,
    prefix: str = "",
) -> Results:  # fmt: skip
    """An evaluation of one target."""
    abouts, cells, averages, dynamics = [], [], [], []
    for kind, label in drafters:
        name = f"{prefix}{kind}-{label.split()[0].lower()}{'-plain' if 'w/o' in label else ''}"
        abouts.append(_about(name, kind, label, shift))
        for rule in rules:
            for choice in ("paper", "best", "one-hot"):
                if rule == "greedy" and choice != "paper":
                    continue
                of = [_cell(name, kind, label, rule, choice, task.name, shift) for task in TASKS]
                cells += of
                averages.append(_average(of))
        if with_dynamics:
            dynamics.append(_dynamics(name, label, shift))
    return Results(
        target=target,
        target_fingerprint=f"{abs(sum(map(ord, target))):016x}",
        settings={"temperature": 1.0, "max_new_tokens": 128, "seed": 0, "num_bootstrap": 1000, "rules": list(rules)},
        provenance={"blockdraft": "0.1.0", "torch": "2.13.0", "host": "<host>", "threads": 2, "git": None},
        tasks=TASKS,
        drafters=abouts,
        cells=cells,
        averages=averages,
        dynamics=dynamics,
    )


def paired(found: Results, drafter: str, baseline: str, spread: float = 0.02) -> Results:
    """Add paired comparisons of two drafters, with intervals that reach ``spread`` to both sides of the ratio."""
    measured = {(m.drafter, m.rule, m.choice, None): m for m in found.averages}
    measured |= {(m.drafter, m.rule, m.choice, m.task): m for m in found.cells}
    made = []
    for (name, rule, choice, task), new in measured.items():
        if name == drafter:
            old = measured[baseline, rule, choice, task]
            for what in ("predicted_length", "acceptance_length", "speedup")[: None if task is None else 2]:
                ratio = estimate(getattr(new, what).value / getattr(old, what).value, spread)
                made.append(PairedRatio(
                    drafter=drafter, baseline=baseline, rule=rule, choice=choice, quantity=what, ratio=ratio, task=task,
                ))  # fmt: skip
    return found.model_copy(update={"comparisons": [*found.comparisons, *made]})


def traces(found: Results, num_prompts: int = 2, num_rounds: int = 4, seed: int = 0) -> Traces:
    """Generations by drafters of made-up words, under block and token verification."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for number in range(num_prompts):
        task = found.tasks[number % len(found.tasks)]
        made = [
            _trace(drafter, rule, num_rounds + number, generator)
            for rule in ("block", "token")
            for drafter in found.drafters
        ]
        text = f"Question {number}: what is a river? {HOSTILE if number else ''}".strip()
        prompts.append(TracedPrompt(task=task.name, id=f"{task.name}-{number}", prompt=text, traces=made))
    return Traces(prompts=prompts)


def write(folder: Path, found: Results, traced: Traces | None = None) -> Path:
    """An evaluation's folder."""
    write_model(found, folder / "results.json")
    if traced is not None:
        write_model(traced, folder / "traces.json")
    return folder


def estimate(value: float, spread: float = 0.1) -> Interval:
    """A number with a symmetric interval."""
    return Interval(value=value, low=value - spread, high=value + spread)


def _about(name: str, kind: str, label: str, shift: float) -> DrafterAbout:
    bv = label.startswith("BV")
    grid = [0.4, 0.6, 0.8, 1.0, 1.2]
    top = 0.6 if bv else 0.8
    points = [
        TemperaturePoint(
            draft_temperature=t,
            acceptance_length={r: 3.2 + LOSS[label] + RULE[r] + shift - 2 * (t - top) ** 2 for r in ("token", "block")},
        )
        for t in grid
    ]
    return DrafterAbout(
        name=name, label=label, path=f"runs/{name}/checkpoint", kind=kind, objective=label.split()[0].lower(),
        num_proposals=BLOCK, num_layers=2, num_parameters=1_234_567, step=176,
        best_draft_temperature={"greedy": 0.0, "token": top, "block": top}, temperatures=points,
        recipe={"objective": {"name": label.split()[0].lower()}, "seed": 42}, checkpoint="last",
        learning_curve=[
            HeldOutPoint(
                step=step, num_blocks=256 * step, accuracy=0.2,
                draft_length={r: (1 + LOSS[label] + RULE[r] + shift) * step / 176 for r in RULE},
            )
            for step in (0, 88, 176)
        ],
    )  # fmt: skip


def _cell(name: str, kind: str, label: str, rule: str, choice: str, task: str, shift: float) -> Cell:
    length = tau(label, kind, rule, task, choice, shift)
    keep = 0.62 + 0.08 * (LOSS[label] + TASK[task])
    conditional = [min(1.0, keep + 0.03 * i) for i in range(BLOCK)]
    retention = torch.tensor(conditional).cumprod(0).tolist()
    rounds = {"sums": 100, "functions": 200, "talk_2": 300}[task]
    tokens = round(length * rounds)
    phases = {"prefill": 0.2, "draft": 0.004 * rounds, "verify": 0.01 * rounds, "rest": 0.001 * rounds}
    speed = tokens / sum(phases.values())
    return Cell(
        drafter=name, rule=rule, choice=choice,
        draft_temperature=0.0 if rule == "greedy" else {"paper": 1.0, "best": 0.7, "one-hot": 0.0}[choice],
        task=task, num_generations=40, num_rounds=rounds, num_tokens=tokens,
        acceptance_length=estimate(length), draft_length=estimate(length - 1), retention=retention,
        conditional=[*conditional[:-1], None] if retention[-1] == 0 else conditional, whole_block_rate=retention[-1],
        predicted_length=estimate(length + 0.03, 0.05), tokens_per_second=speed, baseline_tokens_per_second=90.0,
        speedup=estimate(speed / 90.0), seconds=phases,
        baseline_seconds={"prefill": 0.2, "verify": tokens / 90 - 0.3, "rest": 0.1},
    )  # fmt: skip


def _average(cells: list[Cell]) -> Average:
    def mean(field: str) -> Interval:
        values = [getattr(cell, field) for cell in cells]
        return Interval(**{k: sum(getattr(v, k) for v in values) / len(values) for k in ("value", "low", "high")})

    first = cells[0]
    return Average(
        drafter=first.drafter, rule=first.rule, choice=first.choice, draft_temperature=first.draft_temperature,
        acceptance_length=mean("acceptance_length"), draft_length=mean("draft_length"),
        whole_block_rate=sum(cell.whole_block_rate for cell in cells) / len(cells),
        predicted_length=mean("predicted_length"), speedup=mean("speedup"),
    )  # fmt: skip


def _dynamics(name: str, label: str, shift: float) -> Dynamics:
    points = [
        DynamicsPoint(
            step=30 * epoch,
            epoch=epoch,
            accuracy=0.3 + 0.1 * shift + (0.05 if label == "CE" else 0.035) * epoch,
            draft_length=1.0 + (0.4 + LOSS[label] / 3) * epoch**0.5 + shift,
        )
        for epoch in range(1, 7)
    ]
    return Dynamics(drafter=name, num_texts=64, num_blocks=512, points=points)


WORDS = [" the", " river", " runs", " to", " sea", ",", ".", "\n", "\tdef", " a", "é", " ", HOSTILE, " mill", "<end>"]
END = len(WORDS) - 1


def _trace(drafter: DrafterAbout, rule: str, num_rounds: int, generator: torch.Generator) -> AnswerTrace:
    """Rounds over a distribution of 15 words; a drafter trained with BV is nearer to the target."""
    size = len(WORDS)
    target = torch.randn(size, size, generator=generator).mul(2.5).softmax(-1)
    target[:, END] *= 0.05
    target /= target.sum(-1, keepdim=True)
    share = 0.35 if drafter.label == "CE" else 0.15
    noise = torch.rand(size, size, generator=generator).softmax(-1)
    draft = (1 - share) * target + share * noise
    anchor = 0
    rounds = []
    for _ in range(num_rounds):
        tokens: list[int] = []
        while len(tokens) < BLOCK and END not in tokens:
            row = draft[tokens[-1] if tokens else anchor]
            tokens.append(int(torch.multinomial(row, 1, generator=generator)))
        path = [anchor, *tokens]
        p, q = target[path][None], draft[path[:-1]][None]
        blocks = drafted(rule, p, q, torch.tensor([tokens]), None)
        decided, by_token = coins(rule, blocks), coins("token", blocks)
        thrown = torch.rand(1, len(tokens), generator=generator)
        accepted, token_accepted = int(decided.num_accepted(thrown)), int(by_token.num_accepted(thrown))
        state = coins("block", blocks).state
        following = None if accepted and tokens[accepted - 1] == END else int(
            torch.multinomial(target[path[accepted]], 1, generator=generator)
        )  # fmt: skip
        shown = [
            TracedToken(
                id=token, text=WORDS[token], p=float(p[0, i, token]), q=float(q[0, i, token]),
                alpha=float(state[0, i + 1]), threshold=float(decided.threshold[0, i]), coin=float(thrown[0, i]),
                token_threshold=float(by_token.threshold[0, i]),
            )
            for i, token in enumerate(tokens)
        ]  # fmt: skip
        rounds.append(
            TracedRound(
                anchor=WORDS[anchor], drafted=shown, accepted=accepted, token_accepted=token_accepted,
                next_id=following, next_text=None if following is None else WORDS[following],
            )
        )  # fmt: skip
        if following in (None, END):
            break
        anchor = following
    return AnswerTrace(drafter=drafter.name, rule=rule, draft_temperature=1.0, first_text=WORDS[0], rounds=rounds)
