"""This module makes the logits of one chunk of blocks after the other in the same storage.

A head product is ``logits = hidden @ head.T``, and its gradients are summed over
the chunks. Where blocks overlap, the target's logits of a position are made once
for all blocks that cover it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.losses.rows import computing_dtype


@dataclass(frozen=True)
class TargetIndex:
    """TargetIndex says which of the target's P rows each position of each block reads.

    rows: ``[N, B]``; where a position is not valid, anything.
    bounds: N pairs: the valid positions of block n read rows ``bounds[n][0] <= p < bounds[n][1]``. If it is None, it is
        found from ``rows``, for which the host waits for the device.

    Blocks in the order of their text read neighbouring rows, and it is then that sharing saves most.
    """

    rows: Tensor
    bounds: Sequence[tuple[int, int]] | None = None

    def check(self, target_hidden: Tensor, target_head: Tensor, labels: Tensor) -> None:
        """Refuse shapes that do not belong together."""
        if self.rows.shape != labels.shape:
            raise ValueError(f"target_index must be [N, B] = {list(labels.shape)}, got {list(self.rows.shape)}")
        if self.bounds is not None and len(self.bounds) != len(labels):
            raise ValueError(f"bounds must be a pair for each of {len(labels)} blocks, got {len(self.bounds)}")
        if target_hidden.dim() != 2 or target_head.dim() != 2 or target_head.shape[1] != target_hidden.shape[1]:
            raise ValueError(
                f"with an index target_hidden must be [P, H] and the target head [V, H], got "
                f"{list(target_hidden.shape)} and {list(target_head.shape)}"
            )

    def known_bounds(self, valid: Tensor | None) -> Sequence[tuple[int, int]]:
        """Return the bounds, found from the rows if they are not given."""
        if self.bounds is not None:
            return self.bounds
        every = torch.ones_like(self.rows, dtype=torch.bool) if valid is None else valid
        largest = torch.iinfo(self.rows.dtype).max
        first, last = torch.where(every, self.rows, largest).amin(-1), torch.where(every, self.rows, -1).amax(-1)
        return [(first, last + 1) for first, last in torch.stack([first, last], -1).tolist()]


class HeadProduct:
    """HeadProduct computes ``logits = hidden @ head.T`` and its gradients, a chunk of blocks at a time.

    Hidden states at invalid positions are zeroed, so that nothing there reaches a head's gradient.
    Gradients are summed in the computing dtype.
    """

    def __init__(
        self,
        hidden: Tensor,
        head: Tensor,
        valid: Tensor | None,
        hidden_trains: bool = False,
        head_trains: bool = False,
    ) -> None:
        self.hidden = hidden if valid is None else torch.where(valid.unsqueeze(-1), hidden, 0)
        self.head = head
        self.hidden_gradient = torch.empty_like(hidden, dtype=computing_dtype(head.dtype)) if hidden_trains else None
        self.head_gradient = torch.zeros_like(head, dtype=computing_dtype(head.dtype)) if head_trains else None

    def rows(self, chunk: slice) -> Tensor:
        """Return the chunk's hidden states, ``[n*B, H]`` in the head's dtype."""
        hidden = self.hidden[chunk]
        return hidden.reshape(-1, hidden.shape[-1]).to(self.head.dtype)

    def logits(self, chunk: slice, buffer: Tensor) -> Tensor:
        """Write the chunk's logits ``[n*B, V]`` into the buffer and return them."""
        rows = self.rows(chunk)
        return torch.mm(rows, self.head.t(), out=buffer[: rows.shape[0]])

    def accumulate(self, gradient: Tensor, chunk: slice) -> None:
        """Add the gradient ``[n*B, V]`` of the chunk's logits to those of hidden states and head."""
        if self.hidden_gradient is None and self.head_gradient is None:
            return
        dtype = lower_dtype(gradient, self.head)
        gradient = gradient.to(dtype)
        if self.hidden_gradient is not None:
            self.keep_hidden(gradient @ self.head.to(dtype), chunk)
        self.accumulate_head(gradient, chunk)

    def keep_hidden(self, gradient: Tensor, chunk: slice) -> None:
        """Keep the gradient ``[n*B, H]`` of the chunk's hidden states, if they train."""
        if self.hidden_gradient is not None:
            self.hidden_gradient[chunk] = gradient.view_as(self.hidden[chunk])

    def accumulate_head(self, gradient: Tensor, chunk: slice) -> None:
        """Add the gradient ``[n*B, V]`` of the chunk's logits to that of the head, if it trains."""
        if self.head_gradient is None:
            return
        rows = self.rows(chunk).to(gradient.dtype)
        if self.head_gradient.dtype == gradient.dtype:
            self.head_gradient.addmm_(gradient.t(), rows)
        else:
            self.head_gradient.add_(gradient.t() @ rows)


class TargetLogits:
    """TargetLogits makes the target's logits of one chunk after the other, in the same storage, each row once.

    With an index, a chunk's rows are those between the first and the last that its blocks read, and one more,
    which is uniform, for the positions that are not valid. A chunk whose blocks lie too far apart for that to pay
    has a row for each position.
    """

    def __init__(
        self,
        hidden: Tensor,
        head: Tensor,
        chunks: list[slice],
        block_size: int,
        valid: Tensor | None = None,
        index: TargetIndex | None = None,
    ) -> None:
        self._head, self._index, self._valid = head, index, valid
        self._product = HeadProduct(hidden, head, valid if index is None else None)
        self._parts: dict[int, slice] = {}
        num_rows = largest_chunk(chunks) * block_size
        if index is not None:
            bounds = index.known_bounds(valid)
            for chunk in chunks:
                first, last = min(low for low, _ in bounds[chunk]), max(high for _, high in bounds[chunk])
                if 0 <= last - first < (chunk.stop - chunk.start) * block_size:
                    self._parts[chunk.start] = slice(first, last)
            shared = [part.stop - part.start + 1 for part in self._parts.values()]
            num_rows = max(shared) if len(shared) == len(chunks) and shared else num_rows
        self._buffer = head.new_empty(num_rows, head.shape[0])

    def logits(self, chunk: slice) -> tuple[Tensor, Tensor | None]:
        """Return the logits ``[n*B, V]`` and no index, or ``[P, V]`` and the row ``[n, B]`` of each position."""
        if self._index is None:
            return self._product.logits(chunk, self._buffer), None
        index = self._index.rows[chunk]
        valid = torch.ones_like(index, dtype=torch.bool) if self._valid is None else self._valid[chunk]
        part = self._parts.get(chunk.start)
        if part is None:
            rows = self._product.hidden.index_select(0, torch.where(valid, index, 0).reshape(-1))
            rows = torch.where(valid.reshape(-1, 1), rows, 0).to(self._head.dtype)
            return torch.mm(rows, self._head.t(), out=self._buffer[: len(rows)]), None
        num_rows = part.stop - part.start
        logits = self._buffer[: num_rows + 1]
        torch.mm(self._product.rows(part), self._head.t(), out=logits[:num_rows])
        logits[num_rows].zero_()
        return logits, torch.where(valid, index - part.start, num_rows)


SEPARATE_DEVICES = ("cpu",)
"""Here the product of a bias is added to the head's; elsewhere both are one product, which writes the logits once."""


class LogitBuffers:
    """LogitBuffers makes the logits of one chunk after the other in the same storage, and takes their gradients back.

    On a GPU ``hidden @ head.T + prev @ w2.T`` is one product of ``[hidden, prev]`` and ``[head, w2]``, and so is its
    gradient: logits are written once and not three times, and their gradient is read once less. It takes a copy of
    the head.

    Args:
        products: of the draft head and, if there is one, of the Markov factors, which is added to it.
        target: makes the target's, if they are needed.
        num_rows: of the largest chunk.
    """

    def __init__(self, products: list[HeadProduct], target: TargetLogits | None, num_rows: int) -> None:
        self.products, self._target = products, target
        head = products[0].head
        self._draft_buffer = head.new_empty(num_rows, head.shape[0])
        self._joined: Tensor | None = None
        if len(products) > 1 and head.device.type not in SEPARATE_DEVICES:
            self._joined = torch.cat([product.head.to(head.dtype) for product in products], 1)
            return
        self._bias_heads = [bias.head.to(head.dtype).t() for bias in products[1:]]

    def draft_logits(self, chunk: slice) -> Tensor:
        """Return the draft logits ``[n*B, V]``, biases included."""
        if self._joined is not None:
            rows = torch.cat([product.rows(chunk).to(self._joined.dtype) for product in self.products], 1)
            return torch.mm(rows, self._joined.t(), out=self._draft_buffer[: len(rows)])
        logits = self.products[0].logits(chunk, self._draft_buffer)
        for bias, bias_head in zip(self.products[1:], self._bias_heads, strict=True):
            logits.addmm_(bias.rows(chunk).to(logits.dtype), bias_head)
        return logits

    def accumulate(self, gradient: Tensor, chunk: slice) -> None:
        """Add the gradient ``[n*B, V]`` of the chunk's draft logits to those of all factors that train."""
        if self._joined is None:
            for product in self.products:
                product.accumulate(gradient, chunk)
            return
        gradient = gradient.to(lower_dtype(gradient, self._joined))
        if any(product.hidden_gradient is not None for product in self.products):
            both = gradient @ self._joined.to(gradient.dtype)
            widths = [product.head.shape[1] for product in self.products]
            for product, part in zip(self.products, both.split(widths, 1), strict=True):
                product.keep_hidden(part, chunk)
        for product in self.products:
            product.accumulate_head(gradient, chunk)

    def target_logits(self, chunk: slice) -> tuple[Tensor | None, Tensor | None]:
        """Return the target logits and the row that each position reads, if they are shared; None if not needed."""
        return (None, None) if self._target is None else self._target.logits(chunk)


def lower_dtype(gradient: Tensor, head: Tensor) -> torch.dtype:
    """Return the dtype to multiply in: a gradient that kernels left in a low one is not copied to a higher one."""
    return min(gradient.dtype, head.dtype, key=lambda dtype: dtype.itemsize)


def largest_chunk(chunks: list[slice]) -> int:
    """Return the number of blocks in the largest chunk, 0 if there is none."""
    return max((chunk.stop - chunk.start for chunk in chunks), default=0)
