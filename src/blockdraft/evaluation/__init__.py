"""Measure how many tokens a verification call yields, how much faster decoding is, under which rule, and why."""

from blockdraft.evaluation.candidates import Candidate, ShippedDrafter, load_candidates, shipped_drafters
from blockdraft.evaluation.evaluation import Evaluation
from blockdraft.evaluation.protocol import Protocol
from blockdraft.evaluation.results import (
    EvaluationError,
    Profile,
    Results,
    Traces,
    read_profile,
    read_results,
    read_traces,
)
from blockdraft.evaluation.tasks import Task, load_tasks, task_names

__all__ = [
    "Candidate",
    "Evaluation",
    "EvaluationError",
    "Profile",
    "Protocol",
    "Results",
    "ShippedDrafter",
    "Task",
    "Traces",
    "load_candidates",
    "load_tasks",
    "read_profile",
    "read_results",
    "read_traces",
    "shipped_drafters",
    "task_names",
]
