"""``python -m fuzz``: run the cases, print the table of classes, and every fault in a line of its own."""

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from fuzz import bench
from fuzz.classes import CLASSES, cases
from fuzz.running import Case, Outcome, Verdict, run

COLUMNS = (Verdict.REFUSED, Verdict.ACCEPTED, Verdict.TRACEBACK, Verdict.SILENT, Verdict.HANG, Verdict.UNTIDY)


def main() -> None:
    """Run what the command line asks for; the exit code is 1 if there is a fault."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--scale", type=int, default=1, help="1 for a few hundred cases, 2 for more than 1,500")
    parser.add_argument("--seed", type=int, default=0, help="of the generated cases")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a case counts as hanging")
    parser.add_argument("--only", default="", help="run the classes, or the cases, whose name has this in it")
    parser.add_argument("--json", type=Path, help="write what came of every case to this file")
    parser.add_argument(
        "--good", type=Path, help="keep the good artefacts here, and take them from here if they are there"
    )
    parser.add_argument("--verbose", action="store_true", help="print every case as it ends")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shared = Path("/dev/shm")  # no disk to wait for
    room = Path(tempfile.mkdtemp(prefix="fuzz-", dir=shared if shared.is_dir() else None))
    try:
        good = options.good or room / "good"
        if not good.exists():
            bench.build(good)
        bench.warm_up(good, room)
        found = _run_all(cases(good, options.scale, options.seed), good.resolve(), room, options)
    finally:
        shutil.rmtree(room, ignore_errors=True)
    print(table(found))
    if options.json is not None:
        options.json.write_text(json.dumps([_plain(*each) for each in found], indent=1))
    sys.exit(any(not outcome.good for _, _, outcome in found))


Found = list[tuple[str, Case, Outcome]]


def _run_all(chosen: dict[str, list[Case]], good: Path, room: Path, options: argparse.Namespace) -> Found:
    found: Found = []
    for name, generated in chosen.items():
        for case in generated:
            if options.only not in name and options.only not in case.name:
                continue
            outcome = run(case, good, room, options.limit)
            found.append((name, case, outcome))
            if options.verbose or not outcome.good:
                words = f"{name}: {case.name!a}: {outcome.verdict}: {outcome.why!a}"
                print(words[:400], f"({outcome.seconds:.1f} s)", file=sys.stderr, flush=True)
    return found


def table(found: Found) -> str:
    """Return the counts by class, as a table in Markdown."""
    rows = [["class", "cases", *map(str, COLUMNS)]]
    for name in (*CLASSES, ""):
        verdicts = Counter(outcome.verdict for each, _, outcome in found if name in ("", each))
        if verdicts:
            rows.append([name or "all", str(verdicts.total()), *(str(verdicts[column]) for column in COLUMNS)])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(
        "| " + " | ".join(each.ljust(width) if at == 0 else each.rjust(width) for at, (each, width) in
                          enumerate(zip(row, widths, strict=True))) + " |"
        for row in rows
    )  # fmt: skip


def _plain(name: str, case: Case, outcome: Outcome) -> dict[str, object]:
    return {
        "class": name, "case": ascii(case.name), "arguments": [ascii(each)[:200] for each in case.arguments],
        "verdict": outcome.verdict, "code": outcome.code, "why": ascii(outcome.why), "err": ascii(outcome.err[-3000:]),
        "seconds": round(outcome.seconds, 2),
    }  # fmt: skip


if __name__ == "__main__":
    main()
