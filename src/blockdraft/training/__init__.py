"""Train drafters: say what a run will take, and run it."""

from blockdraft.training.resources import ResourceEstimate, dry_run, estimate, fit
from blockdraft.training.trainer import Progress, StoppedError, Trainer, TrainingError

__all__ = ["Progress", "ResourceEstimate", "StoppedError", "Trainer", "TrainingError", "dry_run", "estimate", "fit"]
