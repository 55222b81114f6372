"""This package holds block drafters: DFlash and DSpark on one backbone."""

from blockdraft.drafters.attention import Anchors, FlexAttention, GroupedAttention, ReferenceAttention
from blockdraft.drafters.checkpoint import SHIPPED, CheckpointError, find_drafter, load_drafter, save_drafter
from blockdraft.drafters.config import DrafterConfig, DrafterConfigError, SlotLayout
from blockdraft.drafters.drafter import DFlash, Drafter, DSpark, Proposal, build_drafter

__all__ = [
    "SHIPPED",
    "Anchors",
    "CheckpointError",
    "DFlash",
    "DSpark",
    "Drafter",
    "DrafterConfig",
    "DrafterConfigError",
    "FlexAttention",
    "GroupedAttention",
    "Proposal",
    "ReferenceAttention",
    "SlotLayout",
    "build_drafter",
    "find_drafter",
    "load_drafter",
    "save_drafter",
]
