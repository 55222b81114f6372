"""Training objectives for block drafters, over full logits or fused with the head product."""

from blockdraft.losses.annealing import Annealing
from blockdraft.losses.block import BV, block_scores
from blockdraft.losses.blocks import Blocks
from blockdraft.losses.fused import fused_linear_objective
from blockdraft.losses.objective import PAPER_SETTINGS, Objective, Value, objective, objective_names, register
from blockdraft.losses.statistics import BlockStatistics, block_statistics
from blockdraft.losses.token import CE, KL, LK, RKL, TV, TokenObjective

__all__ = [
    "BV",
    "CE",
    "KL",
    "LK",
    "PAPER_SETTINGS",
    "RKL",
    "TV",
    "Annealing",
    "BlockStatistics",
    "Blocks",
    "Objective",
    "TokenObjective",
    "Value",
    "block_scores",
    "block_statistics",
    "fused_linear_objective",
    "objective",
    "objective_names",
    "register",
]
