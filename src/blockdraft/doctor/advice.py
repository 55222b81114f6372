"""What measured readings mean, in plain words: which one fits, and what to change in which file."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from blockdraft.doctor.findings import Finding, Measured
from blockdraft.doctor.folder import Folder
from blockdraft.doctor.readings import Clinic, Reading
from blockdraft.drafters import SlotLayout
from blockdraft.drafters.checkpoint import CONFIG, WEIGHTS


def reading_findings(folder: Folder, measured: Sequence[Measured]) -> Iterator[Finding]:
    """Compare the readings of each field; yield a line for every field."""
    for field, group in groupby(measured, key=lambda each: each.field):
        readings = list(group)
        given = next(each for each in readings if each.given)
        fits = next(each for each in readings if each.fits)
        check = f"{field}, measured"
        if fits is not given:
            found = f"given {given.reading}: {given.length:.2f} tokens per call; read {fits.reading}: {fits.length:.2f}"
            yield Finding(check, "wrong", found, change(folder, field, fits.value))
            continue
        others = [each for each in readings if each is not given]
        nearest = max(others, key=lambda each: each.length)
        found = f"{given.reading}: {given.length:.2f} tokens per call; at best {nearest.length:.2f} if read otherwise"
        yield Finding(check, "ok", found)


def change(folder: Folder, field: str, value: Any) -> str:
    """Say what to change so that others read a field as it fits."""
    if field == "slot convention":
        return _change_slots(folder, value == SlotLayout.NEXT_TOKEN)
    if field == "layer ids":
        ids = [layer + folder.first_layer for layer in value]
        return f"set {folder.key('layers')} to {ids} in {CONFIG} (counted from {folder.first_layer} in this format)"
    if field == "mask token":
        return f"set {folder.key('mask')} to {value} in {CONFIG}"
    if field == "rotary positions":
        both = "" if folder.format == "blockdraft" else ", there and in rope_parameters"
        return f"set {folder.key('theta')} to {value:g} in {CONFIG}{both}"
    if field == "causality":
        if not value:
            return f"its blocks are not causal: set is_causal, or causal in dflash_config, to false in {CONFIG}"
        return "it was trained with causal blocks, which blockdraft, z-lab's loop and SGLang do not run; train it anew"
    return f"copy the target's head and embedding into {WEIGHTS}; the folder's are worse"


def _change_slots(folder: Folder, predicts: bool) -> str:
    if folder.format == "blockdraft":
        slots = folder.num_slots or 0
        layout = SlotLayout.NEXT_TOKEN if predicts else SlotLayout.FILL_IN
        return f"set slot_layout to {layout} and num_proposals to {slots - (not predicts)} in {CONFIG}"
    if folder.format == "speculators":
        size = folder.num_slots or 0
        text = f"set sample_from_anchor to {str(predicts).lower()} in {CONFIG}, and speculative_tokens to "
        text += str(size if predicts else size - 1)
        return text + ("; vLLM refuses that for DFlash" if predicts and folder.kind == "dflash" else "")
    if predicts:
        return (
            f"it drafts as DeepSpec's DFlash does: in {CONFIG} write architectures Qwen3DSparkModel, markov_rank 0, "
            "and mask_token_id and target_layer_ids at the top level; engines that know DFlash only drop its slot 0"
        )
    return (
        f"set sample_from_anchor to false in {CONFIG} for blockdraft, and export it as speculators for vLLM; SGLang "
        "reads flat DSpark in the other way only"
    )


def fitting(clinic: Clinic, given: Reading, best: Reading) -> Finding:
    """Say how well the drafter drafts as it fits best, and whether it looks at the text at all."""
    as_given, length = clinic.length(given), clinic.length(best)
    control = clinic.length(replace(best, foreign=True))
    most = best.config.num_proposals + 1
    if not clinic.reads_the_text(best):
        return Finding(
            "drafting",
            "wrong",
            f"{length:.2f} of at most {most} tokens per call under the best reading, and {control:.2f} with features "
            "of other positions: it does not make use of the text",
            "no reading mends that: the weights are untrained, damaged, or of a drafter for another target",
        )
    found = f"{length:.2f} of at most {most} tokens per call under block verification"
    if best != given:
        found += f" as it fits best, {as_given:.2f} as the folder says"
    found += f" ({control:.2f} without the text's features)"
    return Finding("drafting", "ok" if best == given else "warning", found)
