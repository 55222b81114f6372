"""Lossless decoding with or without a drafter."""

from blockdraft.decoding.generation import Generation, OnVerdict, Round, generate
from blockdraft.decoding.request import DecodingError, PromptLike, context_limit, prompt_ids, room

__all__ = [
    "DecodingError",
    "Generation",
    "OnVerdict",
    "PromptLike",
    "Round",
    "context_limit",
    "generate",
    "prompt_ids",
    "room",
]
