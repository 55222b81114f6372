"""A prefetching loader: the batches of one process, made ahead of time by a thread."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from blockdraft.data import Batch, BatchSampler, TextAnchors, collate, partition


class PrefetchingLoader:
    """Yields what this process trains on, step by step, ``accumulation`` batches each.

    ``prepare`` is applied to every batch in the thread: what can be checked, read or pinned before a step is.

    seconds_waited: time that the trainer has waited for batches.
    """

    def __init__(
        self,
        sampler: BatchSampler,
        *,
        rank: int,
        world_size: int,
        accumulation: int,
        prepare: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        self.sampler, self.rank, self.world_size, self.accumulation = sampler, rank, world_size, accumulation
        self.prepare = prepare
        self.seconds_waited = 0.0

    def steps(self, first: int, end: int) -> Iterator[list[Batch]]:
        """Yield the batches of the optimizer steps from ``first`` to ``end``, two steps prefetched."""
        with ThreadPoolExecutor(1) as pool:
            ahead: list[Future[list[Batch]]] = []
            for step in range(first, end):
                while len(ahead) < 2 and step + len(ahead) < end:
                    ahead.append(pool.submit(self.batches, step + len(ahead)))
                start = time.perf_counter()
                ready = ahead.pop(0).result()
                self.seconds_waited += time.perf_counter() - start
                yield ready

    def batches(self, step: int) -> list[Batch]:
        """Return the batches of one optimizer step, counted from the beginning of training."""
        chosen = self.sampler.step(*divmod(step, self.sampler.steps_per_epoch))
        parts = partition(chosen, self.world_size * self.accumulation, self.sampler.dataset)
        mine = parts[self.rank * self.accumulation : (self.rank + 1) * self.accumulation]
        return [self.prepare(self._batch(part, chosen)) for part in mine]

    def _batch(self, part: list[TextAnchors], chosen: list[TextAnchors]) -> Batch:
        """Collate a part. An empty one becomes a block that counts for nothing: every process takes part."""
        dataset, num_proposals = self.sampler.dataset, self.sampler.num_proposals
        if part:
            return collate(part, dataset, num_proposals)
        some = chosen[0].text
        batch = collate([TextAnchors(some, np.array([dataset.prompt_lengths[some]]))], dataset, num_proposals)
        return replace(batch, valid=torch.zeros_like(batch.valid))
