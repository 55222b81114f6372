"""Drafters and targets as folders that serving engines read, checked, with a card."""

from blockdraft.export.check import check_export
from blockdraft.export.drafter import Exported, export_drafter
from blockdraft.export.target import export_target

__all__ = ["Exported", "check_export", "export_drafter", "export_target"]
