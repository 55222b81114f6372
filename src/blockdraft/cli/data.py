"""``blockdraft data``: from prompts to training data."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from blockdraft.data.selection import Summary

ENGINES = ("local", "server")

Device = Annotated[str, typer.Option(help="Where the target runs: cpu, cuda, cuda:1.")]
Precision = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; else float32 on a CPU, bfloat16 elsewhere.")
]

data = typer.Typer(no_args_is_help=True, help="Prompts and training data.")


@data.command()
def prompts(
    source: Annotated[
        str, typer.Option("--from", help="pocket, open-perfectblend, a JSON-lines file, a folder or a Hugging Face id.")
    ],
    out: Annotated[Path, typer.Option(help="The JSON-lines file to write.")],
    num: Annotated[int | None, typer.Option(min=1, help="How many to keep; all if not given.")] = None,
    heldout: Annotated[int, typer.Option(min=0, help="How many to hold out, in a file of their own.")] = 0,
    heldout_out: Annotated[Path | None, typer.Option(help="That file; else OUT's name with .heldout.jsonl.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice, and of pocket's generator.")] = 0,
    split: Annotated[str | None, typer.Option(help="Of a data set; train if not given.")] = None,
    family: Annotated[str | None, typer.Option(help="Of pocket: math, code or chat; all if not given.")] = None,
    min_chars: Annotated[int, typer.Option(min=1, help="Drop prompts with fewer characters.")] = 1,
    max_chars: Annotated[int | None, typer.Option(min=1, help="Drop prompts with more characters.")] = None,
    min_turns: Annotated[int, typer.Option(min=1, help="Drop prompts with fewer user messages.")] = 1,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Drop prompts with more user messages.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON to stdout.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Choose prompts: without repetition, within limits, the same ones for the same seed, some held out."""
    from blockdraft.data import write_prompts
    from blockdraft.data.selection import Limits, draw, select
    from blockdraft.data.sources import POCKET_SOURCE, pocket_prompts, read_source

    if heldout_out is not None and not heldout:
        raise typer.BadParameter("nothing is held out; say how many with --heldout", param_hint="--heldout-out")
    heldout_out = heldout_out or out.with_name(f"{out.stem}.heldout.jsonl")
    _check_paths(source, out, heldout_out)
    limits = Limits(min_chars, max_chars, min_turns, max_turns)
    if source == POCKET_SOURCE:
        if num is None:
            raise typer.BadParameter("pocket's generator never ends; say how many prompts to keep", param_hint="--num")
        if split is not None:
            raise typer.BadParameter("only data sets have splits", param_hint="--split")
        chosen = draw(pocket_prompts(seed, family), num=num, heldout=heldout, limits=limits)
    else:
        if family is not None:
            raise typer.BadParameter("only pocket has families", param_hint="--family")
        chosen = select(read_source(source, split=split), num=num, heldout=heldout, seed=seed, limits=limits)
    write_prompts({out: chosen.kept, heldout_out: chosen.heldout}, force=force)
    if as_json:
        files = {"out": str(out), "heldout_out": str(heldout_out) if heldout else None}
        json.dump(chosen.summary.to_dict() | files, sys.stdout, indent=2)
        print()
    else:
        _show(chosen.summary, out, heldout_out)
    if num is not None and chosen.summary.num_kept < num:
        print(f"note: {num} were asked for, {chosen.summary.num_kept} is all there is", file=sys.stderr)


@data.command()
def regenerate(
    target: Annotated[str, typer.Option(help="pocket, smollm2, a Hugging Face id or a folder.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines, as `data prompts` writes them.")],
    out: Annotated[Path, typer.Option(help="The data folder: a new one, or an unfinished one to resume.")],
    engine: Annotated[
        str | None, typer.Option(help="local (the target runs here) or server; server if --server is given.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take only the first so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of one response.")] = 2048,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Of prompt and response; else 3072, or what the target can read.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="BV loss assumes 1.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="BV loss assumes 0, the whole vocabulary.")] = 0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1.0, help="BV loss assumes 1.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of all draws.")] = 42,
    server: Annotated[
        list[str] | None, typer.Option(help="URL of an OpenAI-compatible server; may be given several times.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The servers' name for the target, if they list several.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at each server.")] = 64,
    api_key_variable: Annotated[str | None, typer.Option(help="Environment variable with the servers' key.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that one request to a server may take.")] = 600.0,
    retries: Annotated[int, typer.Option(min=0, help="Further attempts after a request that failed.")] = 5,
    batch_size: Annotated[int, typer.Option(min=1, help="Responses side by side (local).")] = 64,
    shard_size: Annotated[int, typer.Option(min=1, help="Conversations per shard.")] = 512,
    device: Device = "cpu",
    dtype: Precision = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest's counts as JSON to stdout.")] = False,
) -> None:
    """Sample the target's own responses to prompts, every turn of a conversation on top of its own history.

    Stop it at any moment: the same command resumes.
    """
    from blockdraft.cli.progress import Bar
    from blockdraft.data import Engine, GenerationSettings, LocalEngine, ServerEngine, read_prompts
    from blockdraft.data import regenerate as run
    from blockdraft.targets import Sampling, load_target

    engine = engine or ("server" if server else "local")
    if engine not in ENGINES:
        raise typer.BadParameter(f"{engine!r} is not one of {', '.join(ENGINES)}", param_hint="--engine")
    if (engine == "server") != bool(server):
        raise typer.BadParameter("the engine server, and no other, needs the URL of one", param_hint="--server")
    chosen = read_prompts(prompts)[:limit]
    loaded = load_target(target, device=device, dtype=precision(dtype))
    longest = max_length or min(3072, loaded.context_length or 3072)
    settings = GenerationSettings(Sampling(temperature, top_k, top_p), max_new_tokens, longest, seed)
    sampler: Engine = LocalEngine(loaded, batch_size)
    if server:
        sampler = ServerEngine(
            server, concurrency=concurrency, timeout=timeout, retries=retries, model=model,
            key_variable=api_key_variable,
        )  # fmt: skip
    with Bar(f"{target}, {engine}", len(chosen)) as bar:

        def count(conversations: int, num_tokens: int, new: bool) -> None:
            if new:
                bar.advance(conversations, tokens=num_tokens)
            else:
                bar.skip(conversations)

        manifest = run(chosen, loaded, settings, out, engine=sampler, shard_size=shard_size, on_progress=count)
    _show_counts(out, manifest.totals.model_dump(), as_json=as_json)


@data.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A data folder, complete or not.")],
    target: Annotated[str | None, typer.Option(help="The model to check against; else the manifest's.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Texts to show.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Response tokens whose law is checked, about.")] = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of samples.")] = 0,
    device: Device = "cpu",
    dtype: Precision = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Run the target over a sample of paths.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON to stdout.")] = False,
) -> None:
    """Show what a data folder holds, and check that its tokens follow the target's own law.

    Exits with 2 if they do not.
    """
    from blockdraft.cli.inspection import DataSummary
    from blockdraft.data import DataError, check_sampling, open_dataset, read_manifest
    from blockdraft.targets import load_target

    manifest = read_manifest(folder)
    model = load_target(target or manifest.about.target, device=device, dtype=precision(dtype))
    paths = open_dataset(folder, model, partial=True)
    if len(paths) == 0:
        raise DataError(f"{folder} has no rows yet")
    law = check_sampling(paths, model, num_tokens=tokens, seed=seed) if check else None
    report = DataSummary(folder, paths, model, law)
    if as_json:
        json.dump(report.to_dict(), sys.stdout, indent=2)
        print()
    else:
        report.show(samples, seed)
    if law is not None and not law.plain:
        raise DataError(f"{folder}: {law.verdict}")


def precision(name: str | None) -> "torch.dtype | None":
    """A dtype by its name."""
    from blockdraft.targets import DTYPES

    if name is not None and name not in DTYPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(DTYPES)}", param_hint="--dtype")
    return None if name is None else DTYPES[name]


def _check_paths(source: str, out: Path, heldout_out: Path) -> None:
    if out.resolve() == heldout_out.resolve():
        raise typer.BadParameter(f"{out} is the file for the kept prompts", param_hint="--heldout-out")
    for name, path in (("--out", out), ("--heldout-out", heldout_out)):
        if Path(source).is_file() and path.resolve() == Path(source).resolve():
            raise typer.BadParameter(f"{path} is the file to read from; name another", param_hint=name)


def _show(summary: "Summary", out: Path, heldout_out: Path) -> None:
    """What was kept and dropped, and why, as a table on stderr."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rows", justify="right")
    table.add_column("what became of them", overflow="fold")
    table.add_row(str(summary.num_read), "read")
    table.add_row(str(summary.num_kept), f"kept in {out}")
    if summary.num_heldout:
        table.add_row(str(summary.num_heldout), f"held out in {heldout_out}")
    for reason, count in summary.dropped.items():
        table.add_row(str(count), f"dropped: {reason}", style="dim")
    Console(stderr=True, highlight=False, markup=False).print(table)


def _show_counts(out: Path, counts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        json.dump(counts, sys.stdout, indent=2)
        print()
        return
    print(f"{out}: {counts['rows']:,} rows, {counts['response_tokens']:,} response tokens")
    for reason, num in counts["dropped"].items():
        print(f"  {num:,} conversations not answered to their end: {reason}")
