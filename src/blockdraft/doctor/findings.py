"""What an examination found: a line for each check, and the lengths that were measured."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis.

    check: what was looked at. level: ``ok``, ``warning`` or ``wrong``. found: what is there.
    advice: what to change, and in which file; empty where nothing is to be done.
    """

    check: str
    level: Level
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Measured:
    """The predicted tokens per call of a drafter under one reading of one field.

    field, reading, value: the field that is read, how, in words, and the same as a plain value.
    length: tokens per verification call, correction and bonus tokens included.
    given: whether the folder says so itself. fits: whether this reading fits the drafter best.
    """

    field: str
    reading: str
    value: Any
    length: float
    given: bool
    fits: bool


@dataclass
class Diagnosis:
    """Everything that an examination found.

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
        """What has to be changed."""
        return [each for each in self.findings if each.level == "wrong"]

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong; warnings do not count."""
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
