"""Lossless decoding with or without a drafter."""

from blockdraft.decoding.generation import Generation, Round, generate

__all__ = ["Generation", "Round", "generate"]
