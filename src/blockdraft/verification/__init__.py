"""Verify drafted blocks without loss: exact laws, and a sampler on top of them."""

from blockdraft.verification.rules import RULES, Rule, law
from blockdraft.verification.sampler import Verdict, expected_retention, verify

__all__ = ["RULES", "Rule", "Verdict", "expected_retention", "law", "verify"]
