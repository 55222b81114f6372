"""Evaluation: how many tokens a verification call yields, how much faster decoding is, under which rule, and why."""

from blockdraft.evaluation.about import Candidate, load_candidates
from blockdraft.evaluation.evaluation import Evaluation
from blockdraft.evaluation.protocol import Protocol
from blockdraft.evaluation.results import EvaluationError, Results, Traces, read_results, read_traces
from blockdraft.evaluation.tasks import Task, load_tasks, task_names

__all__ = [
    "Candidate",
    "Evaluation",
    "EvaluationError",
    "Protocol",
    "Results",
    "Task",
    "Traces",
    "load_candidates",
    "load_tasks",
    "read_results",
    "read_traces",
    "task_names",
]
