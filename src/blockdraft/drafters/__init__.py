"""Block drafters: DFlash and DSpark on one backbone."""

from blockdraft.drafters.attention import Anchors, FlexAttention, GroupedAttention, ReferenceAttention
from blockdraft.drafters.checkpoint import CheckpointError, load_drafter, save_drafter
from blockdraft.drafters.config import DrafterConfig, SlotLayout
from blockdraft.drafters.drafter import DFlash, Drafter, DSpark, Proposal, build_drafter

__all__ = [
    "Anchors",
    "CheckpointError",
    "DFlash",
    "DSpark",
    "Drafter",
    "DrafterConfig",
    "FlexAttention",
    "GroupedAttention",
    "Proposal",
    "ReferenceAttention",
    "SlotLayout",
    "build_drafter",
    "load_drafter",
    "save_drafter",
]
