"""Name, explain and check, once, the options that several verbs share.

Nothing here imports PyTorch, so that ``--help`` answers at once.
"""

import json
import math
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from blockdraft.errors import misspelt_target

if TYPE_CHECKING:
    import torch

LARGEST_SEED = 2**63 - 1


class RuleName(StrEnum):
    """Names the verification rules."""

    greedy = "greedy"
    token = "token"
    block = "block"


class DtypeName(StrEnum):
    """Names the precisions that weights can be loaded in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def finite(value: float | list[float] | None) -> float | list[float] | None:
    """Refuse ``nan`` and ``inf``, which Python reads as numbers."""
    for each in value if isinstance(value, list) else [value]:
        if each is not None and not math.isfinite(each):
            raise typer.BadParameter(f"{each} is not a finite number")
    return value


def seed_range(value: int) -> int:
    """Refuse a seed that random generators cannot take."""
    if not 0 <= value <= LARGEST_SEED:
        raise typer.BadParameter(f"{value} is not between 0 and {LARGEST_SEED}")
    return value


def near_target(value: str | None) -> str | None:
    """Refuse a misspelt name of a built-in target at once, before the seconds that importing PyTorch takes."""
    meant = None if value is None else misspelt_target(value)
    if meant is not None:
        raise typer.BadParameter(f"{value}: no such target or folder; did you mean {meant}?")
    return value


TargetName = Annotated[
    str,
    typer.Option(
        "--target",
        metavar="MODEL",
        callback=near_target,
        help="The target model: pocket or smollm2, which are built in, a Hugging Face id, or a local folder.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Where to compute, such as cpu, cuda or cuda:1.",
        show_default="an accelerator if there is one, else the CPU",
    ),
]
Dtype = Annotated[
    DtypeName | None,
    typer.Option(
        "--dtype", help="The precision of the target's weights.", show_default="float32 on a CPU, bfloat16 elsewhere"
    ),
]
NumProposals = Annotated[
    str | None,
    typer.Option(
        "--num-proposals",
        metavar="N|auto|adaptive",
        help="How many tokens the drafter proposes at a time, at most those it was trained with. Auto measures this "
        "machine and takes the number with the most predicted tokens per second; adaptive chooses again in every "
        "round, from what the rounds before it kept.",
        show_default="as many as it was trained with",
    ),
]
TopK = Annotated[
    int, typer.Option("--top-k", metavar="K", min=0, help="Sample from the K most probable tokens only; 0 keeps all.")
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        metavar="P",
        min=1e-6,
        max=1.0,
        callback=finite,
        help="Sample from the fewest tokens whose probabilities sum to P; 1 keeps all.",
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", callback=seed_range, help="The same seed gives the same result.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result to stdout as JSON instead of text.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
OutFolder = Annotated[
    Path,
    typer.Option(
        "--out", metavar="FOLDER", help="The folder to write: a new one, or one that an interrupted run left."
    ),
]
RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="The name of a shipped recipe (see recipes ls), or a YAML file.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Fields of the recipe to change, such as seed=1.", show_default=False),
]


def as_num_proposals(given: str | None) -> "int | Literal['auto', 'adaptive'] | None":
    """Return a number of proposals, ``auto``, ``adaptive``, or None for the drafter's own."""
    if given is None:
        return None
    if given == "auto":
        return "auto"
    if given == "adaptive":
        return "adaptive"
    if not given.isdecimal() or int(given) < 1:
        raise typer.BadParameter(
            f"{given!r} is neither a number of at least 1 nor auto nor adaptive", param_hint="--num-proposals"
        )
    return int(given)


def precision(name: str | None) -> "torch.dtype | None":
    """Return the dtype of this name, or None for the default one."""
    from blockdraft.targets import DTYPES

    if name is not None and name not in DTYPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(DTYPES)}", param_hint="--dtype")
    return None if name is None else DTYPES[name]


def print_json(values: Any) -> None:
    """Print plain values to stdout as JSON."""
    json.dump(values, sys.stdout, indent=2, ensure_ascii=False)
    print()
