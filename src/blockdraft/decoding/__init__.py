"""Decode losslessly, with or without a drafter."""

from blockdraft.decoding.generation import (
    Generation,
    OnVerdict,
    PromptLike,
    ProposalPolicy,
    Round,
    generate,
    prompt_ids,
    room,
)
from blockdraft.decoding.proposals import (
    AdaptiveProposals,
    ProposalChoice,
    RoundCosts,
    best_num_proposals,
    choose_num_proposals,
    measure_costs,
    round_costs,
)
from blockdraft.decoding.rounds import DecodingError

__all__ = [
    "AdaptiveProposals",
    "DecodingError",
    "Generation",
    "OnVerdict",
    "PromptLike",
    "ProposalChoice",
    "ProposalPolicy",
    "Round",
    "RoundCosts",
    "best_num_proposals",
    "choose_num_proposals",
    "generate",
    "measure_costs",
    "prompt_ids",
    "room",
    "round_costs",
]
