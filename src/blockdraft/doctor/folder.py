"""Read a drafter's folder for an examination, and hold what was found: a line for each check, and measured lengths.

A folder keeps its configuration as it stands beside a copy that is mended where something is wrong.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from blockdraft.drafters import DrafterConfig, SlotLayout
from blockdraft.drafters.checkpoint import CONFIG, load_json, load_tensors
from blockdraft.drafters.formats import ARCHITECTURES, FormatError, format_of, read_config
from blockdraft.errors import BlockdraftError

Level = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """Holds one line of a diagnosis.

    check: what was looked at. level: ``ok``, ``warning`` or ``wrong``. found: what is there.
    advice: what to change, and in which file; empty where nothing is to be done.
    """

    check: str
    level: Level
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Measured:
    """Holds the predicted tokens per call of a drafter under one reading of one field.

    field, reading, value: the field that is read, how, in words, and the same as a plain value.
    length: tokens per verification call, correction and bonus tokens included.
    saving: calls that it saves against the reading that fits, per text, in standard errors over the texts; below 0
        where it takes more calls.
    given: whether the folder says so itself. fits: whether this reading fits the drafter best.
    """

    field: str
    reading: str
    value: Any
    length: float
    saving: float
    given: bool
    fits: bool


@dataclass
class Diagnosis:
    """Holds everything that an examination found.

    drafter, target: their names. format: flat, speculators or blockdraft. texts: what the lengths were measured on.
    """

    drafter: str
    target: str
    format: str
    findings: list[Finding] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    texts: str = ""

    @property
    def wrong(self) -> list[Finding]:
        """Say what has to be changed."""
        return [each for each in self.findings if each.level == "wrong"]

    @property
    def healthy(self) -> bool:
        """Tell whether nothing is wrong; warnings do not count."""
        return not self.wrong

    def of(self, check: str) -> list[Finding]:
        """Return the findings of one check."""
        return [each for each in self.findings if each.check == check]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"healthy": self.healthy} | asdict(self)


def listed(names: Sequence[object], limit: int = 4) -> str:
    """Return names in a row, the first few of many."""
    more = len(names) - limit
    return ", ".join(map(str, names[:limit])) + (f" and {more} more" if more > 0 else "")


LAYERS = "transformer_layer_config."
OWN = {
    "slots": "slot_layout", "mask": "mask_token_id", "layers": "target_layers", "depth": "num_target_layers",
    "width": "hidden_size", "vocabulary": "vocab_size", "theta": "rope_theta",
}  # fmt: skip
FLAT = {
    "slots": "sample_from_anchor", "mask": "mask_token_id", "layers": "target_layer_ids",
    "depth": "num_target_layers", "width": "hidden_size", "vocabulary": "vocab_size", "theta": "rope_theta",
}  # fmt: skip
KEYS: dict[str, dict[str, str]] = {
    "blockdraft": OWN,
    "flat dflash": FLAT | {"mask": "dflash_config.mask_token_id", "layers": "dflash_config.target_layer_ids"},
    "flat dspark": FLAT,
    "speculators": FLAT
    | {"layers": "aux_hidden_state_layer_ids", "width": f"{LAYERS}hidden_size", "vocabulary": f"{LAYERS}vocab_size"}
    | {"theta": f"{LAYERS}rope_theta"},
}
"""Where each format keeps what they all say, as paths into ``config.json``."""


class Folder:
    """Holds a drafter's folder while it is examined.

    given: ``config.json`` as it stands. values: a copy, mended wherever a check found something wrong, so that the
        next checks and the measurement can go on. tensors: those of the folder, mended likewise.
    hopeless: why nothing can be measured, once something was found that cannot be mended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.given = load_json(path)
        self.values: dict[str, Any] = copy.deepcopy(self.given)
        self.tensors: dict[str, Tensor] = load_tensors(path)
        self.hopeless: str | None = None

    @property
    def format(self) -> str:
        """Name the format: flat, speculators or blockdraft."""
        return format_of(self.given) or "blockdraft"

    @property
    def kind(self) -> str | None:
        """Name the kind: dflash or dspark, and None if it is neither."""
        if self.format == "flat":
            names = self.given.get("architectures")
            kinds = [ARCHITECTURES.get(str(name)) for name in names] if isinstance(names, list) else []
            return next((kind for kind in kinds if kind is not None), None)
        kind = self.given.get("speculators_model_type" if self.format == "speculators" else "kind")
        return kind if kind in ("dflash", "dspark") else None

    @property
    def layers(self) -> dict[str, Any]:
        """Give the part of the mended configuration that describes the layers."""
        nested = self.values.get(LAYERS.rstrip(".")) if self.format == "speculators" else self.values
        return nested if isinstance(nested, dict) else {}

    def key(self, field: str) -> str:
        """Return the path of a field in ``config.json``, for messages."""
        return KEYS.get(f"flat {self.kind}" if self.format == "flat" else self.format, FLAT).get(field, field)

    def get(self, path: str) -> Any:
        """Return what the mended configuration says at a path, or under the name of a field; None if nothing."""
        value: Any = self.values
        for key in self.key(path).split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def put(self, path: str, value: Any) -> None:
        """Mend a value, also where the section it belongs to is missing."""
        *parents, last = self.key(path).split(".")
        section = self.values
        for key in parents:
            if not isinstance(section.get(key), dict):
                section[key] = {}
            section = section[key]
        section[last] = value

    @property
    def first_layer(self) -> int:
        """Say what this format calls the target's first layer: 1 in speculators, 0 elsewhere."""
        return int(self.format == "speculators")

    @property
    def num_slots(self) -> int | None:
        """Give the slots of a block, if the configuration says so in a number."""
        if self.format == "blockdraft":
            num, layout = self.get("num_proposals"), self.get("slots")
            return num + (layout == SlotLayout.FILL_IN) if isinstance(num, int) else None
        size = self.get("block_size")
        return size if isinstance(size, int) else None

    @property
    def num_features(self) -> int | None:
        """Say how many of the target's layers ``fc`` reads, by its shape."""
        weight = self.tensors.get("fc.weight")
        if weight is None or weight.dim() != 2 or weight.shape[1] % weight.shape[0]:
            return None
        return weight.shape[1] // weight.shape[0]

    def config(self, num_target_layers: int) -> DrafterConfig:
        """Return the mended configuration, checked; a `FormatError` says what is still wrong."""
        try:
            if self.format == "blockdraft":
                return DrafterConfig.from_dict(self.values)
            return read_config(self.values, num_target_layers)
        except BlockdraftError as error:
            raise FormatError(f"{CONFIG}: {error}") from error


def is_int(value: Any) -> bool:
    """Return whether a value of a JSON file is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_number(value: Any) -> float | None:
    """Return a value of a JSON file as a number, and None if it is none, or one that no float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def as_section(value: Any) -> dict[str, Any]:
    """Return a value of a JSON file as a section, an empty one if it is none."""
    return value if isinstance(value, dict) else {}
