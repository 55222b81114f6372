"""``blockdraft evaluate``."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from blockdraft.cli.data import Device, Precision, precision
from blockdraft.cli.tables import print_whole

if TYPE_CHECKING:
    from blockdraft.evaluation import Results


class Spread(TyperCommand):
    """Lets an option that may come several times take all values at once: ``--rules greedy token block``.

    For commands without positional arguments.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        several = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        spread: list[str] = []
        last: str | None = None
        fresh = False
        for arg in args:
            if arg.startswith("--"):
                last, fresh = (arg if arg in several else None), True
            elif last is not None and not fresh:
                spread.append(last)
            else:
                fresh = False
            spread.append(arg)
        return super().parse_args(ctx, spread)


def evaluate(
    drafter: Annotated[
        list[str],
        typer.Option(help="A drafter's or a run's folder, RUN@best, RUN@last, or NAME=FOLDER; several are compared."),
    ],
    out: Annotated[Path, typer.Option(help="The evaluation's folder: new, or one to go on with.")],
    target: Annotated[str, typer.Option(help="pocket, smollm2, a Hugging Face id or a folder.")] = "pocket",
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="gsm8k math500 aime25 humaneval mbpp livecodebench mt-bench, benchmarks (all seven), "
            "pocket (its three), or files of prompts, also of SPEED-Bench and Spec-Bench; pocket if not given."
        ),
    ] = None,
    rules: Annotated[list[str] | None, typer.Option(help="Of greedy, token and block; all if not given.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A folder with NAME.jsonl for the benchmarks; else the Hugging Face hub.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Of each task; else as many as the paper's.")] = None,
    temperature: Annotated[float, typer.Option(help="Of the target, for token and block verification.")] = 1.0,
    draft_temperatures: Annotated[
        list[float] | None, typer.Option(help="Where the best draft temperature is sought; else 0.3 to 1.2.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Of one answer.")] = 256,
    num_traces: Annotated[int, typer.Option(min=0, help="Prompts of each task for the block explorer.")] = 2,
    dynamics_texts: Annotated[
        int, typer.Option(min=0, help="Training texts for the figure of training dynamics; 0 for none.")
    ] = 512,
    checkpoint: Annotated[
        str, typer.Option(help="Which checkpoint of a run's folder is evaluated: best (on held-out texts) or last.")
    ] = "best",
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of prompts and of all draws.")] = 0,
    device: Device = "cpu",
    dtype: Precision = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON to stdout.")] = False,
) -> None:
    """Measure drafters: acceptance length, retention, speed-up, by task and verification rule.

    Stop it at any moment; the same command goes on. Under torchrun the prompts are shared out.
    """
    from blockdraft.cli.progress import Stages
    from blockdraft.distributed import Distributed
    from blockdraft.evaluation import Evaluation, Protocol, load_candidates, load_tasks
    from blockdraft.evaluation.candidates import as_checkpoint
    from blockdraft.evaluation.protocol import GRID, as_rules
    from blockdraft.targets import load_target
    from blockdraft.verification import RULES

    protocol = Protocol(
        rules=as_rules(rules or list(RULES)), temperature=temperature, max_new_tokens=max_new_tokens, seed=seed,
        draft_temperatures=tuple(draft_temperatures) if draft_temperatures else GRID, num_traces=num_traces,
        dynamics_texts=dynamics_texts,
    )  # fmt: skip
    chosen = load_tasks(tasks, folder=prompts, num_prompts=num_prompts, seed=seed)
    processes = Distributed(device)
    try:
        loaded = load_target(target, device=processes.device, dtype=precision(dtype))
        candidates = load_candidates(drafter, loaded, checkpoint=as_checkpoint(checkpoint))
        with Stages(shown=processes.is_main) as stages:
            results = Evaluation(loaded, candidates, chosen, protocol, out, processes, stages.show).run()
    finally:
        processes.close()
    if not processes.is_main:
        return
    if as_json:
        print(results.model_dump_json(indent=2))
    else:
        show(results)
        print(f"{out / 'results.json'}; a report of it: blockdraft report {out} --out DIR", file=sys.stderr)


def show(results: "Results") -> None:
    """The averages as a table on stdout."""
    title = f"{results.target}: mean of {len(results.tasks)} tasks"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("drafter", "rule", "temp.", "tokens/call", "95%", "predicted", "whole", "speed-up"):
        table.add_column(name, justify="left" if name in ("drafter", "rule") else "right", no_wrap=True)
    labels = {each.name: each.label for each in results.drafters}
    for each in results.averages:
        length = each.acceptance_length
        name = each.drafter if labels[each.drafter] == each.drafter else f"{each.drafter}: {labels[each.drafter]}"
        table.add_row(
            Text(name), each.rule, "argmax" if each.draft_temperature == 0 else f"{each.draft_temperature:g}",
            f"{length.value:.2f}", f"{length.low:.2f}-{length.high:.2f}", f"{each.predicted_length.value:.2f}",
            f"{each.whole_block_rate:.1%}", f"{each.speedup.value:.2f}x",
        )  # fmt: skip
    print_whole(table)
