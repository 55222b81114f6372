"""The manifest of a data folder says what decides its rows, where they come from, and the checksums of its shards.

`read_manifest` is the only reader and `write_manifest` the only writer of ``manifest.json``. Folders that
earlier versions wrote in the same format are read as well.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    ValidationError,
    computed_field,
    field_serializer,
    model_validator,
)

from blockdraft.errors import BlockdraftError
from blockdraft.files import explain, read_json, write_json
from blockdraft.targets import Sampling, Target, fingerprint, template_fingerprint

MANIFEST = "manifest.json"
FORMAT: Final = 1
REPAIR = "put a good copy back, or regenerate the data into another folder"

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Checksum = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
ShardName = Annotated[str, StringConstraints(pattern=r"^shard-\d{5,}\.parquet$")]
Counts = dict[str, NonNegativeInt]


class DataError(BlockdraftError):
    """A data folder cannot be used as it is; the message says why, and what to do."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class EngineRecord(_Strict):
    """Names the engine that sampled the rows, with whatever else it says about itself."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    name: str


class Identity(_Strict):
    """States everything that decides the rows: two folders with one identity from a repeatable engine are equal.

    target, template: fingerprints of the target's weights and of its chat template.
    prompts: a digest of all prompts.
    num_responses: how many times every prompt was answered.
    engine: the engine, with what changes its tokens.
    """

    target: Digest
    template: Digest | None
    prompts: Digest
    num_prompts: PositiveInt
    num_responses: PositiveInt = 1
    shard_size: PositiveInt
    engine: EngineRecord
    temperature: float = Field(ge=0, allow_inf_nan=False)
    top_k: NonNegativeInt
    top_p: float = Field(gt=0, le=1)
    max_new_tokens: PositiveInt
    max_length: int = Field(ge=2)
    seed: int
    whole_turns: bool = False

    @property
    def sampling(self) -> Sampling:
        """Give the distribution that the responses were sampled from."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def num_shards(self) -> int:
        """Give the number of shards of the complete folder."""
        return -(-self.num_conversations // self.shard_size)

    @property
    def num_conversations(self) -> int:
        """Give the number of conversations of the complete folder: one for every response to a prompt."""
        return self.num_prompts * self.num_responses

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; fields that earlier versions did not have are left out where they say nothing new."""
        newer = {"whole_turns": False, "num_responses": 1}
        return self.model_dump(exclude={name for name, default in newer.items() if getattr(self, name) == default})


class DataProvenance(_Strict):
    """Says what is known of the rows beyond what decides them: names and versions.

    target: the name that the target was loaded by.
    """

    target: str
    engine: EngineRecord
    blockdraft: str
    torch: str
    transformers: str
    python: str


class Totals(_Strict):
    """Counts rows and tokens.

    finish_reasons: rows by why their response ended.
    dropped: conversations that lack turns, by reason.
    """

    rows: NonNegativeInt
    prompt_tokens: NonNegativeInt
    response_tokens: NonNegativeInt
    finish_reasons: Counts
    dropped: Counts

    @property
    def texts_and_length(self) -> tuple[int, float]:
        """Give the number of texts, at least one, and their mean length in tokens."""
        texts = max(1, self.rows)
        return texts, (self.prompt_tokens + self.response_tokens) / texts


class ShardRecord(Totals):
    """Describes one shard: its counts and the SHA-256 checksum of its file."""

    sha256: Checksum


class Manifest(_Strict):
    """Holds a data folder's account of itself: what decides its rows, what made them, and its shards."""

    format: Literal[1] = FORMAT
    identity: Identity
    about: DataProvenance
    num_shards: PositiveInt
    shards: dict[ShardName, ShardRecord]

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_follows(cls, values: Any) -> Any:
        """Drop ``complete``, which follows from the shards, so that a shard whose entry was deleted is made again."""
        return {k: v for k, v in values.items() if k != "complete"} if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _refuse_the_impossible(self) -> Self:
        if self.num_shards != self.identity.num_shards:
            raise ValueError(
                f"{self.identity.num_conversations} conversations in shards of {self.identity.shard_size} make "
                f"{self.identity.num_shards} shards, not {self.num_shards}"
            )
        names = {shard_name(shard) for shard in range(self.num_shards)}
        for name, shard in self.shards.items():
            if name not in names:
                raise ValueError(f"{name} is not one of the {self.num_shards} shards")
            if sum(shard.finish_reasons.values()) != shard.rows:
                raise ValueError(f"the finish reasons of {name} are not those of {shard.rows} rows")
        return self

    @field_serializer("identity")
    def _plain_identity(self, identity: Identity) -> dict[str, Any]:
        return identity.to_dict()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def complete(self) -> bool:
        """Tell whether every shard is there."""
        return len(self.shards) == self.num_shards

    @property
    def texts_identity(self) -> str:
        """Give a hash of the rows of all shards that are there."""
        return hashlib.sha256("/".join(shard.sha256 for shard in self.shards.values()).encode()).hexdigest()[:16]

    @property
    def totals(self) -> Totals:
        """Give the counts over all shards."""
        shards = list(self.shards.values())
        return Totals(
            rows=sum(shard.rows for shard in shards),
            prompt_tokens=sum(shard.prompt_tokens for shard in shards),
            response_tokens=sum(shard.response_tokens for shard in shards),
            finish_reasons=_added(shard.finish_reasons for shard in shards),
            dropped=_added(shard.dropped for shard in shards),
        )

    def with_shard(self, name: str, shard: ShardRecord) -> "Manifest":
        """Return the manifest of the folder with one shard more."""
        return self.model_copy(update={"shards": dict(sorted({**self.shards, name: shard}.items()))})

    def refuse_other_target(self, folder: Path, target: Target) -> None:
        """Raise if the rows were not sampled from this target, or under another chat template."""
        if self.identity.target != fingerprint(target):
            raise DataError(
                f"{folder} was sampled from {self.about.target} ({self.identity.target}), not from {target.name} "
                f"({fingerprint(target)}). Texts of another model break the identity that BV loss rests on; "
                "regenerate the responses with this target"
            )
        if self.identity.template != template_fingerprint(target):
            raise DataError(f"{folder} was made under another chat template than {target.name} has now; regenerate it")


def shard_name(shard: int) -> str:
    """Return the file name of a shard, counted from 0."""
    return f"shard-{shard:05d}.parquet"


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a data folder; one that is damaged or impossible is a `DataError` that names the file."""
    path = Path(folder) / MANIFEST
    if not os.path.lexists(path):
        raise DataError(f"{folder} is not a data folder: it has no {MANIFEST}; `blockdraft data regenerate` makes one")
    values = read_json(path, DataError, REPAIR)
    if isinstance(values, Mapping) and values.get("format", FORMAT) != FORMAT:
        raise DataError(f"{path} has format {values['format']!r}; this version of blockdraft reads format {FORMAT}")
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        raise DataError(f"{path} is damaged: {explain(error)}; {REPAIR}") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a data folder, whole or not at all."""
    write_json(manifest.model_dump(mode="json"), folder / MANIFEST)


def refuse_other_identity(folder: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise if two identities differ, naming every field that does."""
    differing = [
        f"{key} {there.get(key)!r} there, {here.get(key)!r} here"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key)
    ]
    if differing:
        raise DataError(
            f"{folder} was begun with something else: {'; '.join(differing)}. "
            "Use the same, or another folder for the new data"
        )


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sorted(sum(map(Counter, counts), Counter[str]()).items()))
