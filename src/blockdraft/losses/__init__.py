"""This package holds the training objectives of block drafters, over full logits or fused with the head product.

`scores` computes the quantities of the paper along target-generated blocks, `rows` the sums over the
vocabulary below them. `bv`, `rounds` and `baselines` turn them into objectives, `fused` evaluates these without a
``[tokens, vocabulary]`` tensor, and `reduced` is for drafters over a part of the vocabulary. `reference`
restates every objective as slow loops, for tests.
"""

from blockdraft.losses.baselines import CE, DPACE, E2ETV, KL, LK, RKL, TV, DSparkMixture, LKHybrid, TokenObjective
from blockdraft.losses.bv import BV, PrefixObjective, TokenBV, block_scores
from blockdraft.losses.fused import fused_linear_objective
from blockdraft.losses.objective import (
    PAPER_SETTINGS,
    Annealing,
    BlockStatistics,
    Objective,
    ObjectiveValue,
    block_statistics,
    objective,
    objective_names,
    register,
)
from blockdraft.losses.reduced import OUTSIDE, ReducedTarget, restrict_labels, restrict_target
from blockdraft.losses.rounds import AnchorRuns, Rounds
from blockdraft.losses.scores import Blocks

__all__ = [
    "BV",
    "CE",
    "DPACE",
    "E2ETV",
    "KL",
    "LK",
    "OUTSIDE",
    "PAPER_SETTINGS",
    "RKL",
    "TV",
    "AnchorRuns",
    "Annealing",
    "BlockStatistics",
    "Blocks",
    "DSparkMixture",
    "LKHybrid",
    "Objective",
    "ObjectiveValue",
    "PrefixObjective",
    "ReducedTarget",
    "Rounds",
    "TokenBV",
    "TokenObjective",
    "block_scores",
    "block_statistics",
    "fused_linear_objective",
    "objective",
    "objective_names",
    "register",
    "restrict_labels",
    "restrict_target",
]
