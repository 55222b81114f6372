"""Write a checkpoint of a training run into the package, as a drafter that `--drafter NAME` and `load_drafter` take.

    python tools/ship_drafter.py runs/pocket-dflash-bv --name pocket-dflash-bv --evaluation evaluations/pocket \\
        --command "blockdraft data prompts --from pocket --num 6000 --out prompts.jsonl" \\
        --command "blockdraft data regenerate --target pocket --prompts prompts.jsonl --out data"

The weights are rounded to bfloat16. The folder gets the resolved recipe without paths, versions, the lengths of the
evaluation, and a model card. The evaluation must have the same weights in it, from the run or from a folder that this
tool wrote.
"""

import argparse
import sys
from pathlib import Path

from blockdraft.drafters.checkpoint import SHIPPED_FOLDER
from blockdraft.errors import BlockdraftError
from blockdraft.evaluation import read_results
from blockdraft.export.shipping import ship


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, write the folder, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--name", required=True, help="the name of the shipped drafter")
    parser.add_argument("--evaluation", type=Path, help="the folder of an evaluation of this drafter")
    parser.add_argument("--command", action="append", default=[], help="a command that made the data; repeatable")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="which one of the run")
    parser.add_argument("--num-proposals", type=int, metavar="N", help="propose fewer tokens than it was trained with")
    parser.add_argument("--out", type=Path, default=SHIPPED_FOLDER, help="the folder of shipped drafters")
    parser.add_argument("--force", action="store_true", help="replace a shipped drafter of this name")
    given = parser.parse_args(arguments)
    try:
        results = None if given.evaluation is None else read_results(given.evaluation)
        folder = ship(
            given.run, given.name, results=results, commands=given.command, checkpoint=given.checkpoint,
            num_proposals=given.num_proposals, out=given.out, force=given.force,
        )  # fmt: skip
    except BlockdraftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
