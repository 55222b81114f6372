"""Batches of one process, made ahead of time by a thread."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from blockdraft.data import Batch, BatchSampler, TextAnchors, TextDataset, collate, partition


class PrefetchingLoader:
    """What this process trains on, step by step: ``accumulation`` batches each."""

    def __init__(
        self, plan: BatchSampler, paths: TextDataset, *, rank: int, num_processes: int, accumulation: int
    ) -> None:
        self.plan, self.paths = plan, paths
        self.rank, self.num_processes, self.accumulation = rank, num_processes, accumulation
        self.seconds_waited = 0.0

    def steps(self, first: int, end: int) -> Iterator[list[tuple[Batch, list[int]]]]:
        """Batches, and the texts in them, of the optimizer steps from ``first`` to ``end``."""
        with ThreadPoolExecutor(1) as pool:
            ahead: list[Future[list[tuple[Batch, list[int]]]]] = []
            for step in range(first, end):
                while len(ahead) < 2 and step + len(ahead) < end:
                    ahead.append(pool.submit(self.batches, step + len(ahead)))
                start = time.perf_counter()
                ready = ahead.pop(0).result()
                self.seconds_waited += time.perf_counter() - start
                yield ready

    def batches(self, step: int) -> list[tuple[Batch, list[int]]]:
        """Of one optimizer step, counted from the beginning of training."""
        chosen = self.plan.step(*divmod(step, self.plan.steps_per_epoch))
        parts = partition(chosen, self.num_processes * self.accumulation, self.paths)
        mine = parts[self.rank * self.accumulation : (self.rank + 1) * self.accumulation]
        return [self._batch(part, chosen) for part in mine]

    def _batch(self, part: list[TextAnchors], chosen: list[TextAnchors]) -> tuple[Batch, list[int]]:
        """Tensors of a part. An empty one becomes a block that counts for nothing: every process takes part."""
        if part:
            return collate(part, self.paths, self.plan.num_proposals), [each.text for each in part]
        some = chosen[0].text
        ghost = TextAnchors(some, np.array([self.paths.prompt_lengths[some]]))
        batch = collate([ghost], self.paths, self.plan.num_proposals)
        return replace(batch, valid=torch.zeros_like(batch.valid)), [some]
