"""Write drafters and targets as folders that serving engines read; use drafters as assistants of transformers."""

from blockdraft.export.card import RunFacts, run_facts
from blockdraft.export.engines import EngineNote, as_assistant, engine_notes
from blockdraft.export.folders import Checked, Exported, check_export, export_drafter, export_target, original_format
from blockdraft.export.shipping import ship

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
