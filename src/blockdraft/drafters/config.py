"""Describe a drafter in numbers: the typed ``config.json`` that is written beside its weights."""

import difflib
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from blockdraft.errors import BlockdraftError
from blockdraft.targets import Target, TargetShape, fingerprint

DrafterKind = Literal["dflash", "dspark"]
MarkovKind = Literal["vanilla", "gated", "rnn"]


class DrafterConfigError(BlockdraftError):
    """A drafter cannot be as it is described; the message names the field that is wrong and the reason."""


class SlotLayout(StrEnum):
    """Say which token a slot predicts. A block's slots hold ``[anchor, MASK, MASK, ..]`` at positions p, p+1, ..

    The wrong layout gives an accepted length of about one and no error, so it is
    never implied: every config states it.
    """

    FILL_IN = "fill_in"
    """Slot j predicts token p + j; slot 0 predicts nothing. DFlash."""
    NEXT_TOKEN = "next_token"
    """Slot j predicts token p + j + 1, slot 0 included. DSpark."""


class DrafterConfig(BaseModel):
    """Describe a drafter completely, apart from its weights; frozen, and every field is checked.

    The upper bounds are far beyond any drafter; they keep a damaged file from asking for all of the memory.

    kind: ``dflash`` or ``dspark``.
    slot_layout: which token a slot predicts.
    num_proposals: B, tokens proposed per block, the anchor not counted.
    num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, rms_norm_eps, rope_theta: the layers.
    vocab_size: V, the target's.
    draft_vocab_size: Vd, the tokens that the drafter can propose, if not all V; `Drafter.draft_ids` names them.
    mask_token_id: the row of the target's embedding that stands for a token to be drafted.
    num_target_layers: the target's.
    target_layers: ids of the target's decoder layers whose outputs are the features, counted from 0.
    markov_rank, markov_head, confidence_head: DSpark only.
    target_fingerprint: of the target's weights, as `blockdraft.targets.fingerprint` gives it; None if not recorded.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    kind: DrafterKind
    slot_layout: Annotated[SlotLayout, Field(strict=False)]
    num_proposals: int = Field(ge=1, le=4096)
    num_layers: int = Field(ge=1, le=1024)
    hidden_size: int = Field(ge=1, le=2**20)
    intermediate_size: int = Field(ge=1, le=2**22)
    num_heads: int = Field(ge=1, le=4096)
    num_kv_heads: int = Field(ge=1, le=4096)
    head_dim: int = Field(ge=2, le=2**14, multiple_of=2)
    rms_norm_eps: float = Field(gt=0, lt=1)
    rope_theta: float = Field(gt=0)
    vocab_size: int = Field(ge=1, le=2**24)
    draft_vocab_size: int | None = Field(None, ge=1, le=2**24)
    mask_token_id: int = Field(ge=0)
    num_target_layers: int = Field(ge=1, le=4096)
    target_layers: Annotated[tuple[int, ...], Field(strict=False, min_length=1, max_length=4096)]
    markov_rank: int = Field(0, ge=0, le=2**16)
    markov_head: MarkovKind | None = None
    confidence_head: bool = False
    target_fingerprint: str | None = Field(None, pattern=r"^[0-9a-f]{16}$")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.kind == "dspark") != (self.markov_head is not None and self.markov_rank > 0):
            raise ValueError("a DSpark drafter has a Markov head of some rank, a DFlash drafter has none")
        if self.confidence_head and self.kind == "dflash":
            raise ValueError("a DFlash drafter has no confidence head")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask token {self.mask_token_id} has no row in an embedding of {self.vocab_size}")
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"{self.draft_vocab_size} draft tokens are more than the {self.vocab_size} of the target")
        last = self.num_target_layers - 2
        if not all(0 <= layer <= last for layer in self.target_layers):
            there = f"those of layers 0 to {last}" if last >= 0 else "none"
            raise ValueError(
                f"features of layers {list(self.target_layers)}: a target of {self.num_target_layers} layers has "
                f"{there} (counted from 0; the last layer has none)"
            )
        return self

    @property
    def num_draft_tokens(self) -> int:
        """Give the number of tokens that the drafter can propose: rows of its head."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def num_slots(self) -> int:
        """Give the slots of a block: one more than the proposals where slot 0 predicts nothing."""
        return self.slots_for(self.num_proposals)

    def slots_for(self, num_proposals: int) -> int:
        """Return the number of slots that a block with this number of proposals takes."""
        return num_proposals + (self.slot_layout is SlotLayout.FILL_IN)

    @classmethod
    def for_target(cls, kind: DrafterKind, target: Target | TargetShape, **changes: Any) -> "DrafterConfig":
        """Return the paper's drafter for this target: five layers, 15 proposals, the target's width and heads.

        Args:
            kind: ``dflash`` or ``dspark``.
            target: the model to draft for; of a `TargetShape`, which has no weights, no fingerprint is recorded.
            changes: fields to set otherwise; ``num_features`` chooses the layers as DFlash does, five of them or as
                many as a small target has.
        """
        for name in changes:
            if name not in cls.model_fields and name != "num_features":
                raise DrafterConfigError(_unknown("drafter option", name, [*cls.model_fields, "num_features"]))
        config = target.config
        rope = getattr(config, "rope_parameters", None) or {}
        num_features = changes.pop("num_features", min(5, max(1, target.num_layers - 3)))
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        values: dict[str, Any] = {
            "kind": kind,
            "slot_layout": SlotLayout.FILL_IN if kind == "dflash" else SlotLayout.NEXT_TOKEN,
            "num_proposals": 15,
            "num_layers": 5,
            "hidden_size": target.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": head_dim,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": rope.get("rope_theta") or getattr(config, "rope_theta", 10_000.0),
            "vocab_size": target.vocab_size,
            "num_target_layers": target.num_layers,
        }
        if kind == "dspark":
            values |= {"markov_rank": 256, "markov_head": "vanilla"}
        if "target_layers" not in changes:
            values["target_layers"] = target.feature_layers(num_features)
        if "mask_token_id" not in changes:
            values["mask_token_id"] = target.mask_token_id
        if "target_fingerprint" not in changes:
            values["target_fingerprint"] = recorded_fingerprint(target)
        return cls.from_dict(values | changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DrafterConfig":
        """Check plain values; the inverse of `to_dict`. Every wrong field is named, and the nearest of an unknown."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise DrafterConfigError("; ".join(map(_explain, error.errors()))) from error

    def replace(self, **changes: Any) -> "DrafterConfig":
        """Return a config with these fields changed, checked as a whole."""
        return self.from_dict({name: getattr(self, name) for name in type(self).model_fields} | changes)


def recorded_fingerprint(target: Target | TargetShape) -> str | None:
    """Return the fingerprint that a drafter of this target records, and None where it would tell nothing.

    Fingerprints are made of weights rounded to bfloat16, so float32 and bfloat16 copies of a target share one. float16
    is neither finer nor coarser than bfloat16: a copy in it has a fingerprint that no other copy has.
    """
    if isinstance(target, TargetShape) or target.dtype is torch.float16:
        return None
    return fingerprint(target)


def _explain(error: Any) -> str:
    """Put one of pydantic's errors into a few words."""
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return _unknown("key", name, list(DrafterConfig.model_fields))
    if error["type"] == "missing":
        return f"{name} is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{name} is {error['input']!r}: {message[:1].lower()}{message[1:]}" if name else message


def _unknown(what: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
