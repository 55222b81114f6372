"""Drafters and targets as folders that serving engines read, and drafters as assistants of transformers."""

from blockdraft.export.assistant import as_assistant
from blockdraft.export.card import RunFacts, run_facts
from blockdraft.export.commands import EngineNote, engine_notes
from blockdraft.export.drafter import Checked, Exported, check_export, export_drafter, original_format
from blockdraft.export.shipping import ship
from blockdraft.export.target import export_target

__all__ = [
    "Checked",
    "EngineNote",
    "Exported",
    "RunFacts",
    "as_assistant",
    "check_export",
    "engine_notes",
    "export_drafter",
    "export_target",
    "original_format",
    "run_facts",
    "ship",
]
