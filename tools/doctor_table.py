"""Spoil a drafter that really drafts in every way that is known, and tell what ``blockdraft doctor`` says to each.

``python tools/doctor_table.py`` prints the table of docs/guides/doctor.md. Each row is an export of a shipped drafter
with one thing changed, written to a temporary folder.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.doctor import Diagnosis, examine
from blockdraft.drafters import find_drafter, load_drafter
from blockdraft.drafters.checkpoint import CONFIG, WEIGHTS, stored_dtype
from blockdraft.export import export_drafter
from blockdraft.targets import Target, load_target

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


@dataclass(frozen=True)
class Case:
    """Names one way to spoil a folder.

    form: flat, speculators or blockdraft. words: what is changed, for the table. change: of the configuration and the
    tensors. checks: which checks must say wrong or warning. other_target: examine it for a model of the same shape
    with other weights.
    """

    form: str
    words: str
    change: Change
    checks: tuple[str, ...] = ()
    other_target: bool = False


def put(path: str, value: Any) -> Change:
    """Return a change that sets a value of the configuration, and deletes it if the value is None."""

    def change(values: dict[str, Any], _tensors: dict[str, Tensor]) -> None:
        *parents, last = path.split(".")
        for key in parents:
            values = values[key]
        if value is None:
            del values[last]
        else:
            values[last] = value

    return change


def both(*changes: Change) -> Change:
    """Return a change that makes several."""

    def change(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for each in changes:
            each(values, tensors)

    return change


def tensor(name: str, make: Callable[[Tensor], Tensor] | None) -> Change:
    """Return a change that replaces a tensor, and drops it if there is nothing to replace it with."""

    def change(_values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        old = tensors.pop(name)
        if make is not None:
            tensors[name] = make(old)

    return change


def prefixed(_values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Put every name behind a prefix, as a drafter has that was saved as a part of something else."""
    for name in list(tensors):
        tensors[f"draft_model.{name}"] = tensors.pop(name)


def as_float16(_values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Convert the weights and leave the configuration as it is."""
    for name, old in tensors.items():
        tensors[name] = old.half()


def with_nan(old: Tensor) -> Tensor:
    """Spoil one number."""
    old = old.clone()
    old.view(-1)[0] = torch.nan
    return old


def nothing(_values: dict[str, Any], _tensors: dict[str, Tensor]) -> None:
    """Change nothing."""


NO_RECORD = put("target_fingerprint", None)
ROPE = ("rope_theta", "rope_parameters.rope_theta")
DFLASH = (
    Case("blockdraft", "nothing", nothing),
    Case("flat", "nothing", nothing),
    Case("speculators", "nothing", nothing),
    Case("flat", "`sample_from_anchor: true`", put("sample_from_anchor", True),
         ("slot convention", "slot convention, measured")),
    Case("blockdraft", "`slot_layout: next_token`", both(put("slot_layout", "next_token"), put("num_proposals", 11)),
         ("slot convention, measured",)),
    Case("flat", "layer ids of the first layers, `[1, 2, 3]`", put("dflash_config.target_layer_ids", [1, 2, 3]),
         ("layer ids, measured",)),
    Case("flat", "layer ids one too high, `[2, 8, 14]`", put("dflash_config.target_layer_ids", [2, 8, 14])),
    Case("speculators", "layer ids counted from 0, `[1, 7, 13]`", put("aux_hidden_state_layer_ids", [1, 7, 13])),
    Case("flat", "`mask_token_id: 2`, the end token", put("dflash_config.mask_token_id", 2),
         ("mask token", "mask token, measured")),
    Case("flat", "`mask_token_id: 2047`, the last row", put("dflash_config.mask_token_id", 2047),
         ("mask token", "mask token, measured")),
    Case("flat", "`mask_token_id` missing", put("dflash_config.mask_token_id", None), ("mask token",)),
    Case("flat", "`is_causal: true`", put("is_causal", True), ("causality", "causality, measured")),
    Case("speculators", "`sliding_window_non_causal: false`", put("sliding_window_non_causal", False),
         ("causality",)),
    Case("flat", "`rope_theta: 50`, in both places", both(*(put(path, 50.0) for path in ROPE)),
         ("rotary positions", "rotary positions, measured")),
    Case("flat", "no `rope_theta`", both(*(put(path, None) for path in ROPE)), ("rotary positions",)),
    Case("flat", "a NaN in `fc.weight`", tensor("fc.weight", with_nan), ("numbers", "drafting")),
    Case("flat", "`norm.weight` missing", tensor("norm.weight", None), ("tensors", "drafting")),
    Case("flat", "every name behind `draft_model.`", prefixed, ("tensors",)),
    Case("flat", "weights in float16, `dtype: bfloat16`", as_float16, ("dtype",)),
    Case("flat", "nothing, but another target", nothing, ("target's weights",), other_target=True),
    Case("flat", "the same, fingerprint not recorded", NO_RECORD, ("drafting",), other_target=True),
)  # fmt: skip
DSPARK = (
    Case("flat", "DSpark: nothing", nothing),
    Case("speculators", "DSpark: nothing", nothing),
    Case("flat", "DSpark: `sample_from_anchor: false`", put("sample_from_anchor", False),
         ("slot convention", "slot convention, measured")),
    Case("speculators", "DSpark: no `sample_from_anchor`", put("sample_from_anchor", None), ("slot convention",)),
    Case("flat", "DSpark: `lm_head.weight` missing", tensor("lm_head.weight", None), ("head and embedding",)),
    Case("flat", "DSpark: `lm_head.weight` random", tensor("lm_head.weight", torch.randn_like),
         ("head and embedding", "head and embedding, measured")),
    Case("flat", "DSpark: no `num_anchors`", put("num_anchors", None), ("heads",)),
    Case("flat", "DSpark: Markov head of zeros", tensor("markov_head.markov_w2.weight", torch.zeros_like),
         ("numbers",)),
)  # fmt: skip


def spoil(drafter: Path, target: Target, case: Case, out: Path) -> Path:
    """Write a drafter in the case's format, with its change."""
    if case.form == "blockdraft":
        out.mkdir()
        values, tensors = json.loads((drafter / CONFIG).read_text()), load_file(drafter / WEIGHTS)
    else:
        export_drafter(load_drafter(drafter, target, dtype=stored_dtype(drafter)), target, out, case.form)  # type: ignore[arg-type]
        values, tensors = json.loads((out / CONFIG).read_text()), load_file(out / WEIGHTS)
    case.change(values, tensors)
    (out / CONFIG).write_text(json.dumps(values))
    save_file({name: each.contiguous() for name, each in tensors.items()}, out / WEIGHTS)
    return out


def other_weights(target: Target) -> Target:
    """Return a target of the same shape whose layers come in another order."""
    other = load_target(target.name, device=target.device)
    layers = other.model.model.layers
    for ours, theirs in zip(layers, reversed(target.model.model.layers), strict=True):
        ours.load_state_dict(theirs.state_dict())
    other.name = f"another {target.name}"
    return other


def examinations(drafter: str, target: Target, num_texts: int, words: str = "") -> Iterator[tuple[Case, Diagnosis]]:
    """Examine every spoilt folder of a drafter, or those whose description contains some words."""
    folder = find_drafter(drafter)
    cases = DSPARK if json.loads((folder / CONFIG).read_text())["kind"] == "dspark" else DFLASH
    for case in cases:
        if words not in case.words:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            out = spoil(folder, target, case, Path(temporary) / "spoilt")
            yield case, examine(out, other_weights(target) if case.other_target else target, num_texts=num_texts)


def row(case: Case, found: Diagnosis) -> str:
    """Return a line of the table: format, what was changed, tokens per call as given and as it fits, what was said."""
    told: dict[str, list[str]] = {"wrong": [], "warning": []}
    for each in found.findings:
        if each.level != "ok" and (each.check != "drafting" or each.level == "wrong"):
            told[each.level].append(each.check)
    said = "; ".join(f"{level}: {', '.join(dict.fromkeys(checks))}" for level, checks in told.items() if checks)
    return f"| {case.form} | {case.words} | {' | '.join(lengths(found))} | {said or 'nothing is wrong'} |"


def lengths(found: Diagnosis) -> tuple[str, str]:
    """Return the tokens per call as the folder says and as it fits best; dashes if nothing was measured."""
    words = found.of("drafting")[0].found
    best, given = re.match(r"([\d.]+) of at most", words), re.search(r"([\d.]+) as the folder says", words)
    if best is None:
        return "-", "-"
    return (given or best)[1], best[1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", default="pocket-dflash-ce", help="a trained drafter in blockdraft's own format")
    parser.add_argument("--target", default="pocket", help="its target")
    parser.add_argument("--texts", type=int, default=12, help="how many texts to measure on")
    parser.add_argument("--only", default="", help="only the cases whose description contains this")
    given = parser.parse_args()
    target = load_target(given.target)
    print("| format | changed | as given | as it fits | the doctor said |\n|" + " -- |" * 5)
    for case, found in examinations(given.drafter, target, given.texts, given.only):
        print(row(case, found), flush=True)
        missed = set(case.checks) - {each.check for each in found.findings if each.level != "ok"}
        if missed:
            print(f"missed: {', '.join(sorted(missed))}", flush=True)


if __name__ == "__main__":
    main()
