"""Lossless verification of drafted blocks: exact laws, and a sampler on top of them."""

from blockdraft.verification.lengths import expected_retention
from blockdraft.verification.rules import RULES, Rule, law
from blockdraft.verification.sampler import Verdict, verify

__all__ = ["RULES", "Rule", "Verdict", "expected_retention", "law", "verify"]
