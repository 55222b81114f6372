"""``blockdraft recipes`` and ``blockdraft estimate``."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from blockdraft.training import ResourceEstimate

recipes = typer.Typer(no_args_is_help=True, help="Training recipes: list, show, validate.")

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A shipped recipe, or a YAML file.")]
Assignments = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Fields to set: seed=1.")]


@recipes.command("ls")
def list_recipes() -> None:
    """Names of the shipped recipes: target, drafter and objective."""
    from blockdraft.recipes import shipped_names

    print("\n".join(shipped_names()))


@recipes.command()
def show(recipe: RecipeName, assignments: Assignments = None) -> None:
    """Print a recipe with every field, as YAML."""
    from blockdraft.recipes import load_recipe, to_yaml

    print(to_yaml(load_recipe(recipe, assignments).resolved(), explain=True), end="")


@recipes.command()
def validate(recipes: Annotated[list[str], typer.Argument(metavar="RECIPE...")]) -> None:
    """Check recipes; exit code 2 for the first that is wrong."""
    from blockdraft.recipes import load_recipe

    for name in recipes:
        load_recipe(name)
        print(f"{name}: valid")


def estimate(
    recipe: RecipeName,
    assignments: Assignments = None,
    devices: Annotated[int, typer.Option(min=1, help="Distributed that train together.")] = 1,
    texts: Annotated[int, typer.Option(min=1, help="Texts to train on, if data.path is not set.")] = 100_000,
    tokens_per_text: Annotated[
        float, typer.Option(min=1, help="Mean length, prompt included, if data.path is not set.")
    ] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes and counts as JSON to stdout.")] = False,
) -> None:
    """What a recipe will take: disk, memory per device, tokens and steps. Nothing is loaded or launched."""
    from blockdraft.data import read_manifest
    from blockdraft.recipes import load_recipe
    from blockdraft.training import estimate as compute

    loaded = load_recipe(recipe, assignments)
    if loaded.data.path is not None:
        counts = read_manifest(loaded.data.path).totals
        texts = max(1, counts.rows)
        tokens_per_text = (counts.prompt_tokens + counts.response_tokens) / texts
    found = compute(loaded, num_devices=devices, num_texts=texts, tokens_per_text=tokens_per_text)
    if as_json:
        json.dump(asdict(found) | {"device_bytes": found.device_bytes}, sys.stdout, indent=2)
        print()
    else:
        _show(found, texts, tokens_per_text)


def _show(found: "ResourceEstimate", texts: int, tokens_per_text: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    table.add_row("texts", f"{texts:,}", f"{tokens_per_text:,.0f} tokens each")
    table.add_row("steps", f"{found.num_steps:,}", f"{found.num_tokens:,} tokens through the target, all epochs")
    table.add_row("target", f"{found.target_parameters / 1e6:,.1f} M", "parameters")
    table.add_row("drafter", f"{found.drafter_parameters / 1e6:,.1f} M", "parameters")
    table.add_section()
    table.add_row("data on disk", _size(found.data_bytes), "uncompressed; the files are about half of it")
    table.add_row("feature cache", _size(found.cache_bytes), "only if data.features is cached")
    table.add_section()
    devices = f"on each of {found.num_devices} devices" if found.num_devices > 1 else "on one device"
    table.add_row("target weights", _size(found.target_bytes), devices)
    table.add_row("drafter weights", _size(found.drafter_bytes), "float32, and a copy in the computing precision")
    table.add_row("optimizer", _size(found.optimizer_bytes), "gradients and two moments")
    table.add_row("activations", _size(found.activation_bytes), "of one micro-batch")
    table.add_row("logits, fused", _size(found.fused_bytes), f"{_size(found.unfused_bytes)} if they were not fused")
    table.add_row("together", _size(found.device_bytes), f"{devices}, allocator's waste not counted")
    Console(highlight=False, markup=False, soft_wrap=True).print(table)


def _size(num_bytes: int) -> str:
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes / 2**10:,.1f} KiB"
