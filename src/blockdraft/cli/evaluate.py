"""``blockdraft evaluate`` and ``report`` are the verbs that end with a table of results."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli.options import (
    AsJson,
    Device,
    Dtype,
    NumProposals,
    OutFolder,
    RuleName,
    Seed,
    TargetName,
    as_num_proposals,
    finite,
    precision,
    print_json,
)

if TYPE_CHECKING:
    from rich.table import Table as Grid

    from blockdraft.evaluation import Results
    from blockdraft.evaluation.results import Interval
    from blockdraft.reports import Table


def evaluate(
    drafter: Annotated[
        list[str],
        typer.Option(
            help="A shipped drafter (see drafters ls), the folder of a drafter or of a run, RUN@best, RUN@last, or "
            "NAME=FOLDER; several are compared."
        ),
    ],
    out: OutFolder,
    target: TargetName = "pocket",
    device: Device = None,
    dtype: Dtype = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="The tasks to answer: gsm8k math500 aime25 humaneval mbpp livecodebench mt-bench, benchmarks for all "
            "seven, pocket for its own three, or files of prompts, also of SPEED-Bench and Spec-Bench.",
            show_default="pocket",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="The folder that holds the benchmarks as NAME.jsonl.", show_default="download them from the hub"
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="How many prompts of each task to answer.", show_default="as many as in the paper"
        ),
    ] = None,
    num_decoded: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="How many prompts of each task are also decoded and timed; predicted lengths use all of them, and are "
            "all that is measured with 0.",
            show_default="all",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Stop each answer after N tokens.")] = 256,
    rules: Annotated[
        list[RuleName] | None, typer.Option(help="The verification rules to measure.", show_default="all three")
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(metavar="X", callback=finite, help="The target's temperature under token and block verification."),
    ] = 1.0,
    draft_temperatures: Annotated[
        list[float] | None,
        typer.Option(
            metavar="X",
            callback=finite,
            help="The draft temperatures among which the best one is sought.",
            show_default="0.1 to 1.2",
        ),
    ] = None,
    argmax_drafts: Annotated[
        bool,
        typer.Option(
            "--argmax-drafts/--no-argmax-drafts",
            help="Also measure argmax drafts under token and block verification, as serving engines draft by default.",
        ),
    ] = True,
    num_proposals: NumProposals = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="The names of drafters to compare the others with, those of the same kind if there are any.",
            show_default="the one trained with CE",
        ),
    ] = None,
    num_traces: Annotated[
        int, typer.Option(metavar="N", min=0, help="How many prompts of each task the report's block explorer shows.")
    ] = 2,
    dynamics_texts: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="How many training texts the figure of training dynamics uses; 0 for no figure."
        ),
    ] = 512,
    checkpoint: Annotated[
        str, typer.Option(help="Which checkpoint of a run's folder to evaluate: best on held-out texts, or last.")
    ] = "best",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure drafters: accepted tokens, retention, speed-up.

    Results are given by task and verification rule, with intervals, in one file that blockdraft report reads.
    Stop it whenever you like: the same command resumes. Under torchrun the processes divide the prompts.
    """
    from blockdraft.cli.progress import Stages
    from blockdraft.distributed import Distributed
    from blockdraft.evaluation import Evaluation, Protocol, load_candidates, load_tasks
    from blockdraft.evaluation.candidates import as_checkpoint
    from blockdraft.evaluation.protocol import GRID, as_rules
    from blockdraft.targets import load_target

    protocol = Protocol(
        rules=as_rules([str(rule) for rule in rules or RuleName]), temperature=temperature,
        max_new_tokens=max_new_tokens, seed=seed, num_traces=num_traces, dynamics_texts=dynamics_texts,
        draft_temperatures=tuple(draft_temperatures) if draft_temperatures else GRID, one_hot=argmax_drafts,
        num_proposals=as_num_proposals(num_proposals), num_decoded=num_decoded, baselines=tuple(baseline or ()),
    )  # fmt: skip
    chosen = load_tasks(tasks, folder=prompts, num_prompts=num_prompts, seed=seed)
    distributed = Distributed(device)
    try:
        with distributed.in_turn():
            loaded = load_target(target, device=distributed.device, dtype=precision(dtype))
        candidates = load_candidates(drafter, loaded, checkpoint=as_checkpoint(checkpoint))
        with Stages(shown=distributed.is_main) as stages:
            results = Evaluation(loaded, candidates, chosen, protocol, out, distributed, stages.show).run()
    finally:
        distributed.close()
    if not distributed.is_main:
        return
    if as_json:
        print_json(results.model_dump(mode="json"))
    else:
        show_results(results)
        print(f"{out / 'results.json'}; a report of it: blockdraft report {out} --out DIR", file=sys.stderr)


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="EVALUATION...", help="Folders that evaluate has written.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("report"),
    as_json: AsJson = False,
) -> None:
    """Write tables, figures and a page about evaluations.

    The page needs no network and has a block explorer; several evaluations are shown together.
    """
    from blockdraft.reports import write_report

    written = write_report(folders, out, on_file=lambda file: print(file, file=sys.stderr))
    if as_json:
        paths = {"tables": written.table_files, "figures": written.figure_files}
        print_json({"report": str(written.page)} | {name: list(map(str, files)) for name, files in paths.items()})
        return
    if written.tables:
        _show_table(written.tables[0])
    print(f"{written.page}: {len(written.tables)} tables, {len(written.figure_files) // 2} figures")


def show_results(results: "Results") -> None:
    """Print the averages over all tasks as a table on stdout: predicted lengths, then what was measured in decoding."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    def interval(of: "Interval", unit: str = "") -> tuple[str, str]:
        return f"{of.value:.2f}{unit}", "" if of.bounds is None else f"{of.low:.2f}-{of.high:.2f}"

    title = Text(f"{results.target}: tokens per call, mean of {len(results.tasks)} tasks", style="table.title")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    measured = ("measured", "95%", "whole", "speed-up", "95%") if any(a.speedup for a in results.averages) else ()
    for name in ("drafter", "rule", "drafts at", "predicted", "95%", *measured):
        table.add_column(name, justify="left" if name in ("drafter", "rule") else "right", no_wrap=True)
    abouts = {each.name: each for each in results.drafters}
    for each in results.averages:
        about = abouts[each.drafter]
        name = each.drafter if about.label == each.drafter else f"{each.drafter}: {about.full_label}"
        if about.trained_proposals not in (None, about.num_proposals):
            name += f" ({about.num_proposals} of {about.trained_proposals} proposals)"
        drafts = "argmax" if each.draft_temperature == 0 else f"T={each.draft_temperature:g}"
        row = [Text(name), each.rule, drafts, *interval(each.predicted_length)]
        if each.acceptance_length is not None and each.speedup is not None:
            row += [*interval(each.acceptance_length), f"{each.whole_block_rate:.1%}", *interval(each.speedup, "x")]
        table.add_row(*row)
    _print_whole(table)
    for about in results.drafters:
        for rule in about.best_draft_temperature:
            edge = about.edge_of_grid(rule)
            if edge is not None:
                best = f"{about.best_draft_temperature[rule]:g}"
                print(
                    f"{about.name}, {rule}: the best draft temperature, {best}, is the {edge} that was tried, so one "
                    "beyond may be better",
                    file=sys.stderr,
                )


def _show_table(table: "Table") -> None:
    """Print one of a report's tables, the best values bold."""
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for label in table.labels:
        grid.add_column(Text(label), vertical="bottom")
    for column in table.columns:
        heads = "\n".join(column.heads).replace(" verification", "").replace(" (", "\n(")
        grid.add_column(Text(heads, justify="right"), justify="right", no_wrap=True)
    above = ""
    for row in table.rows:
        if above and row.labels[0] != above:
            grid.add_section()
        labels = ["" if row.labels[0] == above else row.labels[0], *row.labels[1:]]
        grid.add_row(*map(Text, labels), *(Text(v.text, style="bold" if v.best else "") for v in row.values))
        above = row.labels[0]
    _print_whole(grid)


def _print_whole(table: "Grid") -> None:
    """Print a table as wide as it is: a narrow terminal wraps lines, and no number loses a digit."""
    from rich.console import Console

    wide = Console(highlight=False, width=1000)
    Console(highlight=False, width=wide.measure(table).maximum).print(table)
