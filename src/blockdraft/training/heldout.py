"""How long the accepted prefixes are, on paths that are not trained on."""

from dataclasses import fields

import torch

from blockdraft.data import BatchSampler, Features, TextDataset, collate, partition
from blockdraft.distributed import Distributed
from blockdraft.losses import BlockStatistics, objective
from blockdraft.training.step import Step
from blockdraft.verification import RULES

TEXTS_PER_BATCH = 16


class HeldOut:
    """Fixed blocks of held-out texts, whole ones, chosen once."""

    def __init__(
        self,
        paths: TextDataset,
        num_blocks: int,
        num_proposals: int,
        seed: int,
        features: Features,
        temperature: float = 1.0,
    ) -> None:
        self.paths, self.features, self.num_proposals = paths, features, num_proposals
        self.measuring = objective("kl", temperature=temperature)
        plan = BatchSampler(
            paths,
            num_texts=len(paths),
            num_anchors=num_blocks,
            num_proposals=num_proposals,
            seed=seed,
            full_blocks=True,
        )
        self.chosen = [each for each in plan.step(0, 0) if len(each.anchors)]

    @torch.no_grad()
    def measure(self, step: Step, processes: Distributed, *, lockstep: bool = False) -> BlockStatistics:
        """Statistics over all blocks, shared out over the processes.

        In ``lockstep`` every process runs every batch, as weights that are gathered in each pass ask for.
        """
        parts = partition(self.chosen, -(-len(self.chosen) // TEXTS_PER_BATCH), self.paths)
        total: BlockStatistics | None = None
        step.drafter.eval()
        for number, part in enumerate(parts):
            if number % processes.world_size != processes.rank and not lockstep:
                continue
            batch = collate(part, self.paths, self.num_proposals).to(processes.device)
            output = self.features(batch, [each.text for each in part])
            stats = step(batch, output, self.measuring)[2]
            if number % processes.world_size == processes.rank:
                total = stats if total is None else total + stats
        step.drafter.train()
        empty = torch.zeros(self.num_proposals, device=processes.device)
        sums = {}
        for field in fields(BlockStatistics):
            nothing = empty[0] if field.name == "num_blocks" else empty
            sums[field.name] = processes.all_reduce(nothing if total is None else getattr(total, field.name))
        return BlockStatistics(**sums)


def summary(stats: BlockStatistics) -> dict[str, float | list[float]]:
    """Plain numbers for a log."""
    values: dict[str, float | list[float]] = {f"length_{rule}": float(stats.expected_length(rule)) for rule in RULES}
    values |= {f"retention_{rule}": [round(float(x), 5) for x in stats.retention(rule)] for rule in RULES}
    values["token_accuracy"] = float(stats.token_accuracy)
    values["argmax_agreement"] = float(stats.argmax_agreement)
    values["num_blocks"] = float(stats.num_blocks)
    return values
