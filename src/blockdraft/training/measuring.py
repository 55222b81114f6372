"""What is measured while training goes on: expected accepted lengths, real decoding, and how fast it goes."""

import time
from dataclasses import fields
from typing import Any

import torch

from blockdraft.data import BatchSampler, Features, TextDataset, collate, partition
from blockdraft.decoding import generate
from blockdraft.distributed import Distributed
from blockdraft.drafters import Drafter
from blockdraft.losses import BlockStatistics, objective
from blockdraft.targets import Target
from blockdraft.training.capacity import peak_memory, peak_rate
from blockdraft.training.loader import PrefetchingLoader
from blockdraft.training.step import TrainingStep, check_batch
from blockdraft.verification import RULES

TEXTS_PER_BATCH = 16
DECODED_TOKENS = 128


class Rates:
    """Measures how fast a run goes, from now on.

    Args:
        distributed: its device has the peak rate and the memory.
        loader: knows how long the trainer waited for it.
        flops: floating-point operations of a step, all processes together.
        peak_tflops: of a device, if it was given; else it is looked up by the device's name.
    """

    def __init__(
        self, distributed: Distributed, loader: PrefetchingLoader, flops: float, peak_tflops: float | None = None
    ) -> None:
        self.device, self.loader = distributed.device, loader
        peak = peak_rate(self.device) if peak_tflops is None else peak_tflops * 1e12
        self.share_of_peak = None if peak is None else flops / (peak * distributed.world_size)
        self.started, self.waited = time.perf_counter(), loader.seconds_waited

    def measure(self, num_steps: int, num_blocks: float) -> dict[str, float]:
        """Return the rates over so many steps, with the number of blocks in the last."""
        seconds = time.perf_counter() - self.started
        rates = {
            "steps_per_second": num_steps / seconds,
            "blocks_per_second": num_blocks * num_steps / seconds,
            "waiting_for_data": (self.loader.seconds_waited - self.waited) / seconds,
            "peak_memory_gib": peak_memory(self.device) / 2**30,
        }
        if self.share_of_peak is not None:
            rates["flop_utilization"] = self.share_of_peak * num_steps / seconds
        return rates


class HeldOutBlocks:
    """Measures how long the accepted prefixes are, on the same whole blocks of held-out texts every time."""

    def __init__(
        self,
        dataset: TextDataset,
        num_blocks: int,
        num_proposals: int,
        seed: int,
        features: Features,
        temperature: float = 1.0,
    ) -> None:
        self.dataset, self.features, self.num_proposals = dataset, features, num_proposals
        self.objective = objective("ce", temperature=temperature)  # any will do: only the statistics are read
        sampler = BatchSampler(
            dataset,
            num_texts=len(dataset),
            num_anchors=num_blocks,
            num_proposals=num_proposals,
            seed=seed,
            full_blocks=True,
            max_anchors_per_text=num_blocks,
        )
        self.chosen = [each for each in sampler.step(0, 0) if len(each.anchors)]

    @torch.no_grad()
    def measure(self, step: TrainingStep, distributed: Distributed, *, lockstep: bool = False) -> BlockStatistics:
        """Return statistics over all blocks, shared out over the processes.

        In ``lockstep`` every process runs every batch, as weights that are gathered in each pass ask for.
        """
        parts = partition(self.chosen, -(-len(self.chosen) // TEXTS_PER_BATCH), self.dataset)
        total: BlockStatistics | None = None
        step.drafter.eval()
        for number, part in enumerate(parts):
            mine = number % distributed.world_size == distributed.rank
            if mine or lockstep:
                batch = collate(part, self.dataset, self.num_proposals)
                check_batch(batch, step.target.vocab_size)
                batch = batch.to(distributed.device)
                stats = step(batch, self.features(batch), self.objective)[2]
                if mine and stats is not None:
                    total = stats if total is None else total + stats
        step.drafter.train()
        empty = torch.zeros(self.num_proposals, device=distributed.device)
        sums = {}
        for field in fields(BlockStatistics):
            nothing = empty[0] if field.name == "num_blocks" else empty
            sums[field.name] = distributed.all_reduce(nothing if total is None else getattr(total, field.name))
        return BlockStatistics(**sums)


def summary(stats: BlockStatistics) -> dict[str, float | list[float]]:
    """Return plain numbers for a log."""
    values: dict[str, float | list[float]] = {f"length_{rule}": float(stats.expected_length(rule)) for rule in RULES}
    values |= {f"retention_{rule}": [round(float(x), 5) for x in stats.retention(rule)] for rule in RULES}
    values["token_accuracy"] = float(stats.token_accuracy)
    values["argmax_agreement"] = float(stats.argmax_agreement)
    values["num_blocks"] = float(stats.num_blocks)
    return values


class DecodedPrompts:
    """Decodes the first few held-out prompts under block verification.

    Its random streams are its own and the same every time: two measurements differ by the drafter alone, and
    training's random state is not touched.
    """

    def __init__(self, dataset: TextDataset, num_prompts: int, target: Target, temperature: float, seed: int) -> None:
        self.prompts = [dataset[i][: dataset.prompt_lengths[i]].tolist() for i in range(num_prompts)]
        self.target, self.temperature, self.seed = target, temperature, seed

    def measure(self, drafter: Drafter) -> dict[str, Any]:
        """Return the tokens retained per verification call, pooled over the prompts, and the first text."""
        drafter.eval()
        found = [
            generate(
                self.target, drafter, prompt, temperature=self.temperature, max_new_tokens=DECODED_TOKENS,
                seed=self.seed + number, cuda_graphs=False,  # training needs the memory, and new weights new graphs
            )
            for number, prompt in enumerate(self.prompts)
        ]  # fmt: skip
        drafter.train()
        rounds = [each for out in found for each in out.rounds]
        length = sum(len(each.tokens) for each in rounds) / max(1, len(rounds))
        return {"decoded_length_block": length, "decoded_text": found[0].text}
