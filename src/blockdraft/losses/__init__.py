"""This package holds the training objectives of block drafters, over full logits or fused with the head product.

`scores` computes the quantities of the paper along target-generated blocks, `rows` the sums over the
vocabulary below them, `token`, `bv` and `rivals` turn them into objectives, and `fused` does it all without a
``[tokens, vocabulary]`` tensor. `reference` restates every objective as slow loops, for tests.
"""

from blockdraft.losses.annealing import Annealing
from blockdraft.losses.bv import BV, PrefixObjective, TokenBV, block_scores
from blockdraft.losses.fused import fused_linear_objective
from blockdraft.losses.objective import PAPER_SETTINGS, Objective, ObjectiveValue, objective, objective_names, register
from blockdraft.losses.rivals import DPACE, E2ETV, DSpark, LKHybrid
from blockdraft.losses.scores import Blocks
from blockdraft.losses.statistics import BlockStatistics, block_statistics
from blockdraft.losses.token import CE, KL, LK, RKL, TV, TokenObjective

__all__ = [
    "BV",
    "CE",
    "DPACE",
    "E2ETV",
    "KL",
    "LK",
    "PAPER_SETTINGS",
    "RKL",
    "TV",
    "Annealing",
    "BlockStatistics",
    "Blocks",
    "DSpark",
    "LKHybrid",
    "Objective",
    "ObjectiveValue",
    "PrefixObjective",
    "TokenBV",
    "TokenObjective",
    "block_scores",
    "block_statistics",
    "fused_linear_objective",
    "objective",
    "objective_names",
    "register",
]
