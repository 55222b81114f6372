"""What a drafter is, in numbers; written beside its weights."""

import dataclasses
import difflib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from blockdraft.targets import Target, TargetShape

DrafterKind = Literal["dflash", "dspark"]
MarkovKind = Literal["vanilla", "gated", "rnn"]


class SlotLayout(StrEnum):
    """Which token a slot predicts. BatchedKVCache hold ``[anchor, MASK, MASK, ..]`` at positions p, p+1, ..

    The wrong layout gives an accepted length of about one and no error, so it is
    never implied: every config states it.
    """

    FILL_IN = "fill_in"
    """Slot j predicts token p + j; slot 0 predicts nothing. DFlash."""
    NEXT_TOKEN = "next_token"
    """Slot j predicts token p + j + 1, slot 0 included. DSpark."""


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape of a drafter.

    num_proposals: B, tokens proposed per block, the anchor not counted.
    target_layers: ids of the target's decoder layers whose outputs are the features.
    markov_rank, markov_head, confidence_head: DSpark only.
    """

    kind: DrafterKind
    slot_layout: SlotLayout
    num_proposals: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    mask_token_id: int
    num_target_layers: int
    target_layers: tuple[int, ...]
    markov_rank: int = 0
    markov_head: MarkovKind | None = None
    confidence_head: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "slot_layout", SlotLayout(self.slot_layout))
        object.__setattr__(self, "target_layers", tuple(self.target_layers))
        if self.kind not in ("dflash", "dspark"):
            raise ValueError(f"unknown drafter {self.kind!r}; known: dflash, dspark")
        if (self.kind == "dspark") != (self.markov_head is not None and self.markov_rank > 0):
            raise ValueError("a DSpark drafter has a Markov head of some rank, a DFlash drafter has none")
        if self.confidence_head and self.kind == "dflash":
            raise ValueError("a DFlash drafter has no confidence head")
        if self.markov_head not in (None, "vanilla", "gated", "rnn"):
            raise ValueError(f"unknown Markov head {self.markov_head!r}; known: vanilla, gated, rnn")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads")
        if self.num_proposals < 1 or self.num_layers < 1:
            raise ValueError("a drafter proposes at least one token and has at least one layer")

    @property
    def num_slots(self) -> int:
        """BatchedKVCache of a block: one more than the proposals where slot 0 predicts nothing."""
        return self.num_proposals + (self.slot_layout is SlotLayout.FILL_IN)

    @classmethod
    def for_target(cls, kind: DrafterKind, target: Target | TargetShape, **changes: Any) -> "DrafterConfig":
        """The paper's drafter for this target: five layers, 15 proposals, the target's width and heads."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in changes:
            if name not in known | {"num_features"}:
                near = difflib.get_close_matches(name, known, n=1)
                raise ValueError(f"unknown drafter option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        config = target.config
        rope = getattr(config, "rope_parameters", None) or {}
        num_features = changes.pop("num_features", min(5, target.num_layers - 2))
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        defaults: dict[str, Any] = {
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
            defaults |= {"markov_rank": 256, "markov_head": "vanilla"}
        if "target_layers" not in changes:
            defaults["target_layers"] = target.feature_layers(num_features)
        if "mask_token_id" not in changes:
            defaults["mask_token_id"] = target.mask_token_id
        return cls(kind=kind, **(defaults | changes))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self) | {
            "slot_layout": str(self.slot_layout),
            "target_layers": list(self.target_layers),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DrafterConfig":
        """The inverse of `to_dict`; refuses unknown and missing keys by name."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(known))
        required = {n for n, f in known.items() if f.default is dataclasses.MISSING}
        missing = sorted(required - set(values))
        if unknown or missing:
            raise ValueError(f"drafter config: unknown keys {unknown}, missing keys {missing}")
        return cls(**values)
