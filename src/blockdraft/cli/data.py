"""``blockdraft data`` chooses prompts, lets the target answer them, and inspects the result."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.options import (
    AsJson,
    Device,
    Dtype,
    Force,
    OutFolder,
    Seed,
    TargetName,
    TopK,
    TopP,
    finite,
    near_target,
    precision,
    print_json,
)

if TYPE_CHECKING:
    from rich.console import Console

    from blockdraft.data import SamplingCheck, TextDataset
    from blockdraft.data.selection import Summary
    from blockdraft.targets import Target

ENGINES = ("local", "server")

QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}

MOST_OF_POCKET = 1_000_000
"""Prompts that may be asked of pocket's generator, which would never end."""


def prompts(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="Where prompts come from: pocket (its generator), open-perfectblend, a JSON-lines file, a folder of "
            "them, or the Hugging Face id of a data set.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The JSON-lines file to write.")],
    num: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many prompts to keep.", show_default="all")
    ] = None,
    heldout: Annotated[
        int, typer.Option(metavar="N", min=0, help="How many more prompts to hold out, in a file of their own.")
    ] = 0,
    heldout_out: Annotated[
        Path | None,
        typer.Option(
            help="The file for the prompts that are held out.",
            show_default="the name of --out, ending in .heldout.jsonl",
        ),
    ] = None,
    seed: Seed = 0,
    split: Annotated[str | None, typer.Option(help="The split of a data set.", show_default="train")] = None,
    family: Annotated[
        str | None, typer.Option(help="The kind of pocket's prompts: math, code or chat.", show_default="all")
    ] = None,
    min_chars: Annotated[int, typer.Option(metavar="N", min=1, help="Drop prompts with fewer characters.")] = 1,
    max_chars: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Drop prompts with more characters.")
    ] = None,
    min_turns: Annotated[int, typer.Option(metavar="N", min=1, help="Drop prompts with fewer user messages.")] = 1,
    max_turns: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Drop prompts with more user messages.")
    ] = None,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Choose prompts to train on.

    Duplicates and prompts outside the limits are dropped; some prompts can be held out for measurements.
    """
    from blockdraft.data import write_prompts
    from blockdraft.data.selection import POCKET_SOURCE, Limits, pocket_prompts, read_source, select, select_generated

    if heldout_out is not None and not heldout:
        raise typer.BadParameter("nothing is held out; say how many with --heldout", param_hint="--heldout-out")
    if not out.name:
        raise typer.BadParameter("name a file to write", param_hint="--out")
    heldout_out = heldout_out or out.with_name(f"{out.stem}.heldout.jsonl")
    _check_paths(source, out, heldout_out)
    limits = Limits(min_chars, max_chars, min_turns, max_turns)
    if source == POCKET_SOURCE:
        if (num or 0) + heldout > MOST_OF_POCKET:
            raise typer.BadParameter(
                f"pocket's generator repeats itself; ask for at most {MOST_OF_POCKET:,} prompts", param_hint="--num"
            )
        if num is None:
            raise typer.BadParameter("pocket's generator never ends; say how many prompts to keep", param_hint="--num")
        if split is not None:
            raise typer.BadParameter("only data sets have splits", param_hint="--split")
        chosen = select_generated(pocket_prompts(seed, family), num=num, heldout=heldout, limits=limits)
    else:
        if family is not None:
            raise typer.BadParameter("only pocket has families", param_hint="--family")
        chosen = select(read_source(source, split=split), num=num, heldout=heldout, seed=seed, limits=limits)
    write_prompts({out: chosen.kept, heldout_out: chosen.heldout}, force=force)
    if as_json:
        files = {"out": str(out), "heldout_out": str(heldout_out) if heldout else None}
        print_json(chosen.summary.to_dict() | files)
    else:
        _show(chosen.summary, out, heldout_out)
    if num is not None and chosen.summary.num_kept < num:
        print(f"note: {num} were asked for, {chosen.summary.num_kept} is all there is", file=sys.stderr)


def regenerate(
    target: TargetName,
    prompts: Annotated[Path, typer.Option(help="The prompts to answer: JSON lines, as data prompts writes them.")],
    out: OutFolder,
    device: Device = None,
    dtype: Dtype = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Where answers are computed: local is this process, server is one or more OpenAI-compatible servers.",
            show_default="server if --server is given, else local",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Answer only the first N prompts.")] = None,
    num_responses: Annotated[int, typer.Option(metavar="N", min=1, help="How many times to answer each prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Stop each answer after N tokens.")] = 2048,
    max_length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="The largest number of tokens of a prompt and its answer together.",
            show_default="3072, or what the target can read",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many answers the local engine samples at once.")
    ] = 64,
    shard_size: Annotated[int, typer.Option(metavar="N", min=1, help="How many conversations one file holds.")] = 512,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="X", min=0.0, callback=finite, help="The target's temperature; the BV objective assumes 1."
        ),
    ] = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 42,
    server: Annotated[
        list[str] | None,
        typer.Option(help="The URL of an OpenAI-compatible server; give the option several times for several servers."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The name that the servers give the target, if they serve several.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many requests each server works on at once.")
    ] = 64,
    api_key_variable: Annotated[
        str | None, typer.Option(help="The environment variable that holds the servers' API key.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.001, help="How long one request to a server may take.")
    ] = 600.0,
    retries: Annotated[
        int, typer.Option(metavar="N", min=0, help="How often a request that failed is sent again.")
    ] = 5,
    as_json: AsJson = False,
) -> None:
    """Sample the target's own answers to prompts.

    Conversations are answered turn by turn, each on top of the target's earlier answers.
    Stop it whenever you like: the same command resumes.
    """
    from blockdraft.cli.progress import Stages
    from blockdraft.data import Engine, GenerationSettings, LocalEngine, ServerEngine, read_prompts
    from blockdraft.data import regenerate as run
    from blockdraft.targets import Sampling, load_target

    engine = ("server" if server else "local") if engine is None else engine
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
    with Stages() as stages:
        done = 0

        def count(conversations: int, num_tokens: int, new: bool) -> None:
            nonlocal done
            done += conversations
            stages.show(f"{target}, {engine}", done, len(chosen) * num_responses, num_tokens if new else 0, fresh=new)

        manifest = run(
            chosen, loaded, settings, out, engine=sampler, num_responses=num_responses, shard_size=shard_size,
            on_progress=count,
        )  # fmt: skip
    _show_counts(out, manifest.totals.model_dump(), as_json=as_json)


def inspect(
    folder: Annotated[Path, typer.Argument(help="A folder that data regenerate has written, complete or not.")],
    target: Annotated[
        str | None,
        typer.Option(
            callback=near_target,
            help="The model whose answers these should be.",
            show_default="the one that the folder names",
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    samples: Annotated[int, typer.Option(metavar="N", min=0, help="How many texts to show.")] = 3,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Run the target over some texts to see whether it wrote them.")
    ] = True,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="About how many answer tokens to check.")] = 20_000,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Show and check what a data folder holds.

    The check is whether its tokens were sampled from the target at temperature 1 over the whole vocabulary.
    The exit code is 2 if they were not.
    """
    from blockdraft.cli.progress import Stages
    from blockdraft.data import DataError, check_sampling, open_dataset, read_manifest
    from blockdraft.targets import load_target

    manifest = read_manifest(folder)
    model = load_target(target or manifest.about.target, device=device, dtype=precision(dtype))
    texts = open_dataset(folder, model, partial=True)
    if len(texts) == 0:
        raise DataError(f"{folder} has no rows yet")
    sampling = None
    if check:
        with Stages() as stages:
            stages.show("checking texts", 0, 1)
            sampling = check_sampling(texts, model, num_tokens=tokens, seed=seed)
            stages.show("checking texts", 1, 1)
    report = DataSummary(folder, texts, model, sampling)
    if as_json:
        print_json(report.to_dict())
    else:
        report.show(samples, seed)
    if sampling is not None and not sampling.plain:
        raise DataError(f"{folder}: {sampling.verdict}")


class DataSummary:
    """Tells what a data folder holds: counts, lengths, samples, and whether the target sampled its texts."""

    def __init__(self, folder: Path, texts: "TextDataset", target: "Target", sampling: "SamplingCheck | None") -> None:
        assert texts.manifest is not None
        self.folder, self.texts, self.manifest, self.target = folder, texts, texts.manifest, target
        self.sampling = sampling

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain values."""
        manifest = self.manifest
        check = self.sampling
        found = None if check is None else asdict(check) | {"plain": check.plain, "verdict": check.verdict}
        return {
            "about": manifest.about.model_dump(),
            "identity": manifest.identity.to_dict(),
            "complete": manifest.complete,
            "counts": manifest.totals.model_dump(),
            "lengths": self.lengths(),
            "sampling_check": found,
        }

    def lengths(self) -> dict[str, dict[str, int]]:
        """Return quantiles of prompt and response lengths."""
        import numpy as np

        columns = {"prompt": self.texts.prompt_lengths, "response": self.texts.response_lengths}
        return {
            name: {what: int(np.quantile(lengths, q, method="nearest")) for what, q in QUANTILES.items()}
            for name, lengths in columns.items()
        }

    def show(self, num_samples: int, seed: int) -> None:
        """Print the summary."""
        from rich.console import Console
        from rich.table import Table

        console = Console(highlight=False, markup=False, soft_wrap=True)
        self._samples(console, num_samples, seed)
        manifest, counts = self.manifest, self.manifest.totals
        state = "complete" if manifest.complete else f"{len(manifest.shards)} of {manifest.num_shards} shards"
        console.print(f"{self.folder}: {state}, every checksum right", style="bold")
        identity = manifest.identity
        settings = ", ".join(
            f"{name} {getattr(identity, name)}" for name in ("temperature", "top_k", "top_p", "max_new_tokens", "seed")
        )
        console.print(
            f"target {manifest.about.target} ({manifest.identity.target}), engine {manifest.identity.engine.name}"
        )
        console.print(f"said to be sampled with {settings}")
        times = f", each answered {identity.num_responses} times" if identity.num_responses > 1 else ""
        console.print(f"{identity.num_prompts:,} prompts{times}")
        reasons = ", ".join(f"{num:,} {reason}" for reason, num in counts.finish_reasons.items())
        console.print(f"{counts.rows:,} rows ({reasons}), {counts.response_tokens:,} response tokens")
        for reason, num in counts.dropped.items():
            console.print(f"{num:,} conversations not answered to their end: {reason}")
        table = Table("tokens", *QUANTILES, box=None, pad_edge=False, header_style="bold")
        for name, values in self.lengths().items():
            table.add_row(name, *(str(value) for value in values.values()))
        console.print(table)
        if self.sampling is not None:
            self._show_sampling(console, self.sampling)

    def _show_sampling(self, console: "Console", found: "SamplingCheck") -> None:
        console.print(
            f"{found.num_tokens:,} tokens: mean log-probability {found.mean_log_prob:.4f}, minus the entropy "
            f"{-found.mean_entropy:.4f}, z = {found.z:+.1f}"
        )
        console.print(found.verdict, style="green" if found.plain else "bold red")

    def _samples(self, console: "Console", num_samples: int, seed: int) -> None:
        import numpy as np
        from rich.text import Text

        chosen = np.random.default_rng(seed).permutation(len(self.texts))[:num_samples]
        for index in chosen.tolist():
            ids = self.texts[index].tolist()
            cut = int(self.texts.prompt_lengths[index])
            text = Text(self.target.decode(ids[:cut], skip_special_tokens=False), style="dim")
            text.append(self.target.decode(ids[cut:], skip_special_tokens=False), style="not dim green")
            console.print(text)
            console.print()


def _check_paths(source: str, out: Path, heldout_out: Path) -> None:
    for name, path in (("--out", out), ("--heldout-out", heldout_out)):
        try:
            path.resolve()
        except (OSError, RuntimeError) as error:  # before Python 3.13 a link to itself is a RuntimeError
            raise typer.BadParameter(f"{path} cannot be followed: its links lead nowhere", param_hint=name) from error
    if out.resolve() == heldout_out.resolve():
        raise typer.BadParameter(f"{out} is the file for the kept prompts", param_hint="--heldout-out")
    for name, path in (("--out", out), ("--heldout-out", heldout_out)):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise typer.BadParameter(f"{path} is a device or a pipe; name an ordinary file", param_hint=name)
        if Path(source).is_file() and path.resolve() == Path(source).resolve():
            raise typer.BadParameter(f"{path} is the file to read from; name another", param_hint=name)


def _show(summary: "Summary", out: Path, heldout_out: Path) -> None:
    """Print what was kept and dropped, and why, as a table on stderr."""
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
        print_json(counts)
        return
    print(f"{out}: {counts['rows']:,} rows, {counts['response_tokens']:,} response tokens")
    for reason, num in counts["dropped"].items():
        print(f"  {num:,} conversations not answered to their end: {reason}")
