"""This example trains one small drafter for tokens per round and for the number of rounds, and counts rounds.

The target writes texts out of phrases of 2 to 8 tokens, each followed by one of three others, with a little noise.
Which phrase comes next is hard to guess, the rest of a phrase is easy. The drafter sees where in which phrase its
anchor is, through a bottleneck too narrow to draft well from everywhere. All objectives see the same runs of 16
consecutive anchors; afterwards each drafter's expected tokens per verification call are computed along held-out
texts, where rounds start where decoding would start them, and, for comparison, at anchors spread evenly.

    python examples/rounds.py                      seeds 0 and 1, bottlenecks of 3 and 8
    python examples/rounds.py --seeds 0 --widths 3 ce bv rounds
"""

import argparse

import torch
from torch import Tensor, nn

from blockdraft.losses import Annealing, Blocks, objective
from blockdraft.losses.rounds import trace

VOCAB_SIZE, BLOCK_SIZE, NUM_PHRASES, NUM_NEXT, NOISE = 10, 6, 16, 3, 0.05
NUM_STEPS, NUM_RUNS, RUN_LENGTH, LEARNING_RATE = 600, 8, 16, 0.05
NUM_TEXTS, TEXT_LENGTH = 64, 400


class Target:
    """The target is a Markov chain over the places of all phrases; each place has its token, now and then another."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 9, (NUM_PHRASES,), generator=g)
        starts = lengths.cumsum(0) - lengths
        self.num_places = int(lengths.sum())
        tokens = torch.randint(VOCAB_SIZE, (self.num_places,), generator=g)
        self.emission = torch.full((self.num_places, VOCAB_SIZE), NOISE / VOCAB_SIZE)
        self.emission[torch.arange(self.num_places), tokens] += 1 - NOISE
        self.transition = torch.zeros(self.num_places, self.num_places)
        for phrase in range(NUM_PHRASES):
            first, last = int(starts[phrase]), int(starts[phrase] + lengths[phrase]) - 1
            for place in range(first, last):
                self.transition[place, place + 1] = 1
            following = torch.randperm(NUM_PHRASES, generator=g)[:NUM_NEXT]
            weights = torch.rand(NUM_NEXT, generator=g) + 0.2
            self.transition[last, starts[following]] = weights / weights.sum()
        self.log_probs = (self.transition @ self.emission).log()  # of the next token, by place

    def runs(self, num_runs: int, length: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the anchors' places ``[N]``, log p ``[N, B, V]``, labels ``[N, B]`` and run ids ``[N]``."""
        places = [torch.randint(self.num_places, (num_runs,), generator=g)]
        for _ in range(length + BLOCK_SIZE - 1):
            places.append(torch.multinomial(self.transition[places[-1]], 1, generator=g).squeeze(1))
        place = torch.stack(places, 1)
        token = torch.multinomial(self.emission[place.flatten()], 1, generator=g).view_as(place)
        at = torch.arange(length)[:, None] + torch.arange(BLOCK_SIZE)
        segments = torch.repeat_interleave(torch.arange(num_runs), length)
        return (
            place[:, :length].flatten(),
            self.log_probs[place[:, at]].flatten(0, 1),
            token[:, at + 1].flatten(0, 1),
            segments,
        )


class Drafter(nn.Module):
    """The drafter proposes all positions of a block at once, like DFlash, through a bottleneck."""

    def __init__(self, num_places: int, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(num_places, width), nn.Linear(width, BLOCK_SIZE * VOCAB_SIZE)

    def forward(self, places: Tensor) -> Tensor:
        return self.head(self.embedding(places)).view(-1, BLOCK_SIZE, VOCAB_SIZE)


def train(name: str, target: Target, width: int) -> Drafter:
    """Return a drafter trained from scratch by Adam."""
    torch.manual_seed(0)
    drafter, generator = Drafter(target.num_places, width), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=LEARNING_RATE)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, NUM_STEPS)
    annealing = Annealing(NUM_STEPS)
    for _ in range(NUM_STEPS):
        places, log_p, labels, segments = target.runs(NUM_RUNS, RUN_LENGTH, generator)
        loss = annealing.apply(objective(name))(drafter(places), log_p, labels, segments=segments).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        annealing.advance()
    return drafter


@torch.no_grad()
def evaluate(drafter: Drafter, target: Target) -> tuple[float, float, float]:
    """Return tokens per call in decoding, at anchors spread evenly, and the share of negative credits."""
    places, log_p, labels, _ = target.runs(NUM_TEXTS, TEXT_LENGTH, torch.Generator().manual_seed(99))
    blocks = Blocks(drafter(places), log_p, labels)
    kept = blocks.log_sampled.exp().view(NUM_TEXTS, TEXT_LENGTH, BLOCK_SIZE)
    found = trace(kept, torch.ones(NUM_TEXTS, TEXT_LENGTH, dtype=torch.bool), "anywhere")
    decoding = 1 / found.calls_per_token.mean()
    return float(decoding), float(1 + kept.sum(-1).mean()), float((found.credit < 0).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["ce", "bv", "rounds"], metavar="name")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="targets (default: 0 1)")
    parser.add_argument("--widths", type=int, nargs="+", default=[3, 8], help="bottlenecks (default: 3 8)")
    arguments = parser.parse_args()
    print("seed   width   objective   tokens per call   at even anchors   negative credits")
    for seed in arguments.seeds:
        target = Target(seed)
        for width in arguments.widths:
            for name in arguments.names:
                decoding, even, negative = evaluate(train(name, target, width), target)
                print(
                    f"{seed:4}   {width:5}   {name:<9}   {decoding:15.3f}   {even:15.3f}   {negative:16.1%}", flush=True
                )


if __name__ == "__main__":
    main()
