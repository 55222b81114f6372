"""Evaluation: how many tokens a verification call yields, how much faster decoding is, under which rule, and why."""

from blockdraft.evaluation.results import EvaluationError, Results, Traces, read_results, read_traces

__all__ = ["EvaluationError", "Results", "Traces", "read_results", "read_traces"]
