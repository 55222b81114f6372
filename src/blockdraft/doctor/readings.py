"""Find the reading of an ambiguous field that fits the weights, and what to change if it is not the given one.

A drafter that is read wrongly still drafts, a little; nothing fails. So every field that can be misread is read in all
plausible ways, the other fields as they fit best so far, and the one under which the target's own texts take
clearly fewer verification calls, as predicted, is the one it was trained with.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockdraft.data import Batch, Completion, Features
from blockdraft.doctor.configuration import target_theta
from blockdraft.doctor.folder import Finding, Folder, Measured
from blockdraft.drafters import Anchors, Drafter, DrafterConfig, SlotLayout, build_drafter
from blockdraft.drafters.attention import BlockAttention
from blockdraft.drafters.checkpoint import CONFIG, WEIGHTS
from blockdraft.evaluation.prediction import Predictor, RoundSums
from blockdraft.targets import Target, TargetOutput, UnsupportedTargetError, choose_layers

GAIN, STANDARD_ERRORS = 1.05, 2.0
"""A reading is better than another if it keeps GAIN times its tokens per call, by STANDARD_ERRORS over the texts."""
SLIGHT_GAIN, SLIGHT_STANDARD_ERRORS = 1.005, 3.0
"""A smaller gain becomes a warning if it is clearer than that: the field matters little to this drafter."""
MOST_STANDARD_ERRORS = 99.0
CONTROL = 1.15
"""A drafter reads its features if those of the text keep this many times the tokens of those of other positions."""
PASSES = 2
LAYOUTS = {SlotLayout.FILL_IN: "fill-in (slot 0 discarded)", SlotLayout.NEXT_TOKEN: "next token (slot 0 predicts)"}
CAUSALITY = {False: "every slot sees its whole block", True: "slots see earlier slots only"}


@dataclass(frozen=True)
class Reading:
    """Says how to read a folder, in one of the ways that are possible.

    causal: slots see earlier slots only. own_head: the folder's own head and embedding instead of the target's.
    foreign: features of other positions of the text, which tell a drafter nothing.
    """

    config: DrafterConfig
    causal: bool = False
    own_head: bool = False
    foreign: bool = False


class Option(NamedTuple):
    """Holds one reading of a field: in words, as a plain value, and what it changes."""

    name: str
    value: Any
    change: Callable[[Reading], Reading]


@dataclass(frozen=True)
class Choice:
    """Names a field with several readings. The first is the one that the folder gives."""

    field: str
    options: tuple[Option, ...]


class Clinic:
    """Measures readings of one folder on texts of its target; the target runs over each text once.

    tensors: the drafter's. own: the target with the folder's own head and embedding, if it has any.
    texts: of the target, sampled at ``temperature``; an unfinished one is longer than a block.
    """

    def __init__(
        self,
        target: Target,
        tensors: dict[str, Tensor],
        own: Target | None,
        texts: Sequence[Completion],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
    ) -> None:
        self.target, self.own, self.texts = target, own, list(texts)
        self.tensors = {
            name: tensor.to(target.device, target.dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in tensors.items()
        }
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self._layers = _LayerFeatures(target)
        self._measured: dict[Reading, list[RoundSums]] = {}

    def rounds(self, reading: Reading) -> list[RoundSums]:
        """Return the expected rounds of every text under block verification."""
        if reading not in self._measured:
            self._measured[reading] = self.predict(reading, self.texts)
        return self._measured[reading]

    def predict(self, reading: Reading, texts: Sequence[Completion]) -> list[RoundSums]:
        """Return the same for other texts; nothing is kept."""
        drafter, config = self._drafter(reading.config), reading.config
        found = []
        for text in texts:
            predictor = Predictor(
                self.target, drafter, self.temperature, self._budget(text, config), seed=0,
                features=_Chosen(self._layers, config.target_layers, foreign=reading.foreign),
                frozen=self.own if reading.own_head else self.target,
                make_attention=_causal_attention if reading.causal else None,
            )  # fmt: skip
            found.append(predictor.predict(text, {"block": [self.temperature]})["block"][0])
        return found

    def _budget(self, text: Completion, config: DrafterConfig) -> int:
        """Return how many tokens of a text to write: all but those that the last block of an unfinished one needs."""
        if text.finish_reason == "stop":
            return self.max_new_tokens
        return min(self.max_new_tokens, len(text.response_ids) - config.num_slots)

    def length(self, reading: Reading) -> float:
        """Return the predicted tokens per call, over all texts."""
        return pooled(self.rounds(reading))

    def better(self, one: Reading, other: Reading, gain: float = GAIN) -> bool:
        """Return whether a reading keeps clearly more tokens per call than another one, ``gain`` times as many."""
        return self.length(one) >= gain * self.length(other) and self.saving(one, other) > STANDARD_ERRORS

    def saving(self, one: Reading, other: Reading) -> float:
        """Return how many calls one reading saves per text against another one, in standard errors.

        Both write the same texts, so the calls of each text are compared, text by text.
        """
        saved = np.array([b.num - a.num for a, b in zip(self.rounds(one), self.rounds(other), strict=True)])
        error = float(saved.std(ddof=1)) / len(saved) ** 0.5 if len(saved) > 1 else 0.0
        if error == 0.0:
            return MOST_STANDARD_ERRORS * float(np.sign(saved.mean()))
        return float(np.clip(saved.mean() / error, -MOST_STANDARD_ERRORS, MOST_STANDARD_ERRORS))

    def reads_the_text(self, reading: Reading) -> bool:
        """Return whether the text's own features help; without training, others do as well."""
        return self.better(reading, replace(reading, foreign=True), CONTROL)

    def best(self, given: Reading, choices: Sequence[Choice]) -> tuple[Reading, list[Measured]]:
        """Choose the reading of every field in turn, the others as they fit best so far.

        The first choice decides what the next ones are measured with, so the fields are gone through twice: a field
        that looked indifferent while another one was misread gets its say.
        """
        chosen = given
        decided: dict[str, int] = {}
        for _ in range(PASSES):
            before = chosen
            for choice in choices:
                readings = [option.change(chosen) for option in choice.options]
                now = decided.get(choice.field, 0)
                for number, reading in enumerate(readings):
                    if self.better(reading, readings[now]) and self.reads_the_text(reading):
                        now = number
                decided[choice.field], chosen = now, readings[now]
            if chosen == before:
                break
        measured = []
        for choice in choices:
            for number, (name, value, change) in enumerate(choice.options):
                reading, fits = change(chosen), number == decided[choice.field]
                length, saving = self.length(reading), self.saving(reading, chosen)
                measured.append(Measured(choice.field, name, value, length, saving, given=number == 0, fits=fits))
        return chosen, measured

    def _drafter(self, config: DrafterConfig) -> Drafter:
        with torch.device("meta"):
            drafter = build_drafter(config)
        drafter.load_state_dict(self.tensors, assign=True)
        return drafter.eval()


def pooled(rounds: Sequence[RoundSums]) -> float:
    """Return tokens per call over several texts."""
    total = sum(rounds, RoundSums())
    return total.tokens / total.num if total.num else 0.0


def choices_for(given: Reading, target: Target, *, says_causal: bool, own: bool) -> list[Choice]:
    """Return the fields of a folder that can be misread, each with its plausible readings."""
    config = given.config
    slots = sorted(SlotLayout, key=lambda layout: layout is not config.slot_layout)
    layers = {config.target_layers: "as given"}
    for step, name in ((1, "one layer later"), (-1, "one layer earlier")):
        moved = tuple(layer + step for layer in config.target_layers)
        if all(0 <= layer <= target.num_layers - 2 for layer in moved):
            layers.setdefault(moved, name)
    with contextlib.suppress(UnsupportedTargetError):
        usual = choose_layers(target.name, target.num_layers, len(config.target_layers))
        layers.setdefault(usual, "DFlash's own choice")
    masks = {config.mask_token_id: "as given"}
    for token, name in mask_tokens(target).items():
        masks.setdefault(token, name)
    thetas = {config.rope_theta: "as given"}
    thetas.setdefault(target_theta(target), "the target's")
    thetas.setdefault(10_000.0, "the default of transformers 4")
    blocks = [Option(CAUSALITY[causal], causal, _flag(causal=causal)) for causal in (says_causal, not says_causal)]
    heads = [Option(name, own, _flag(own_head=own)) for own, name in ((True, "the folder's"), (False, "the target's"))]
    choices = [
        Choice("slot convention", tuple(Option(LAYOUTS[each], str(each), _layout(each)) for each in slots)),
        Choice(
            "layer ids", tuple(Option(f"{list(v)}, {n}", list(v), _set(target_layers=v)) for v, n in layers.items())
        ),
        Choice("mask token", tuple(Option(f"{v}, {n}", v, _set(mask_token_id=v)) for v, n in masks.items())),
        Choice("rotary positions", tuple(Option(f"{v:g}, {n}", v, _set(rope_theta=v)) for v, n in thetas.items())),
        Choice("causality", tuple(blocks)),
        Choice("head and embedding", tuple(heads) if own else ()),
    ]
    single = config.num_slots == 1  # nothing is left of such a block if its slot is discarded
    return [each for each in choices if len(each.options) > 1 and not (single and each.field == "slot convention")]


def mask_tokens(target: Target) -> dict[int, str]:
    """Return the tokens that drafters of this target may have for a mask, with what they are."""
    found: dict[int, str] = {}
    with contextlib.suppress(UnsupportedTargetError):
        found[target.mask_token_id] = "the usual one of this target"
    for name in ("mask", "pad", "unk", "eos"):
        token = getattr(target.tokenizer, f"{name}_token_id", None)
        if token is not None and 0 <= token < target.embedding.shape[0]:
            found.setdefault(token, f"the tokenizer's {name} token")
    for token in sorted(target.eos_ids):
        found.setdefault(token, "an end token")
    found.setdefault(0, "the first row of the embedding")
    found.setdefault(target.embedding.shape[0] - 1, "the last row of the embedding")
    return {token: name for token, name in found.items() if token < target.vocab_size}


def _layout(layout: SlotLayout) -> Callable[[Reading], Reading]:
    def change(reading: Reading) -> Reading:
        num = reading.config.num_slots - (layout is SlotLayout.FILL_IN)
        return replace(reading, config=reading.config.replace(slot_layout=layout, num_proposals=num))

    return change


def _set(**changes: object) -> Callable[[Reading], Reading]:
    return lambda reading: replace(reading, config=reading.config.replace(**changes))


def _flag(**changes: Any) -> Callable[[Reading], Reading]:
    return lambda reading: replace(reading, **changes)


# Features and attention


@dataclass
class _LayerFeatures:
    """Runs the target over a text once for every layer that is asked for, and keeps what it made."""

    target: Target
    _kept: dict[bytes, tuple[Tensor, dict[int, Tensor]]] = field(default_factory=dict)

    def of(self, batch: Batch, layers: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Return the hidden states ``[N, T, H]`` after the final norm, and the outputs ``[N, T, H]`` of layers."""
        key = batch.tokens.cpu().numpy().tobytes()
        hidden, kept = self._kept.get(key, (None, {}))
        missing = sorted(set(layers) - kept.keys())
        if hidden is None or missing:
            out = self.target.forward(batch.tokens, layers=missing, spans=batch.spans, positions=batch.positions)
            width = self.target.hidden_size
            parts = () if out.features is None else out.features.split(width, -1)
            kept, hidden = kept | dict(zip(missing, parts, strict=True)), out.hidden
            self._kept[key] = hidden, kept
        return hidden, [kept[layer] for layer in layers]


class _Chosen(Features):
    """Gives features of some layers; foreign ones are those of positions half a text away."""

    def __init__(self, source: _LayerFeatures, layers: Sequence[int], *, foreign: bool) -> None:
        self.source, self.layers, self.foreign = source, tuple(layers), foreign

    def __call__(self, batch: Batch) -> TargetOutput:
        hidden, parts = self.source.of(batch, self.layers)
        features = torch.cat(parts, -1)
        return TargetOutput(hidden, features.roll(features.shape[1] // 2, 1) if self.foreign else features)


class CausalAttention(BlockAttention):
    """Attend as an engine does that takes a drafter for causal: each slot sees the context and earlier slots."""

    def __init__(self, anchors: Anchors) -> None:
        self.anchors = anchors

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        num_slots, groups = q.shape[2], q.shape[1] // k.shape[1]
        later = torch.ones(num_slots, num_slots, dtype=torch.bool, device=q.device).triu(1)
        outputs = []
        for a in range(len(self.anchors)):
            row, end, start = (int(x[a]) for x in (self.anchors.row, self.anchors.position, self.anchors.start))
            keys = torch.cat([context_k[row, :, start:end], k[a]], 1).repeat_interleave(groups, 0)
            values = torch.cat([context_v[row, :, start:end], v[a]], 1).repeat_interleave(groups, 0)
            scores = q[a] @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
            scores[:, :, end - start :].masked_fill_(later, -torch.inf)
            outputs.append(scores.softmax(-1) @ values)
        return torch.stack(outputs) if outputs else q


def _causal_attention(anchors: Anchors, _num_slots: int, _num_rows: int, _context_length: int) -> BlockAttention:
    return CausalAttention(anchors)


def reading_findings(folder: Folder, measured: Sequence[Measured], *, drafts: bool = True) -> Iterator[Finding]:
    """Compare the readings of each field; yield a line for every field.

    A reading other than the given one that fits is wrong; one that is better by little is a warning, if the drafter
    ``drafts`` at all under the best reading. Where the texts do not tell readings apart, the line says so.
    """
    for name, group in groupby(measured, key=lambda each: each.field):
        readings = list(group)
        given = next(each for each in readings if each.given)
        fits = next(each for each in readings if each.fits)
        others = [each for each in readings if each is not given]
        check, found = f"{name}, measured", f"given {given.reading}: {given.length:.2f} tokens per call"
        if fits is not given:
            found += f"; read {fits.reading}: {fits.length:.2f}"
            yield Finding(check, "wrong", found, how_to_change(folder, name, fits.value))
            continue
        slight = [
            each
            for each in others
            if drafts and each.saving > SLIGHT_STANDARD_ERRORS and each.length > SLIGHT_GAIN * given.length
        ]
        nearest = max(slight or others, key=lambda each: each.length)
        found += f"; read {nearest.reading}: {nearest.length:.2f}"
        if slight:
            found += ", a little more, and clearly so"
            yield Finding(check, "warning", found, f"probably: {how_to_change(folder, name, nearest.value)}")
        elif nearest.saving > -STANDARD_ERRORS:
            found += ", too close to tell apart on these texts"
            yield Finding(check, "ok", found, "nothing: this drafter hardly depends on it; --texts measures on more")
        else:
            yield Finding(check, "ok", found)


def how_to_change(folder: Folder, field: str, value: Any) -> str:
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
        return "it was trained with causal blocks, which blockdraft, z-lab's loop and SGLang do not run; train it again"
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
