"""Lossless decoding with or without a drafter."""

from blockdraft.decoding.generation import Generation, Round, generate
from blockdraft.decoding.sampling import Sampling

__all__ = ["Generation", "Round", "Sampling", "generate"]
