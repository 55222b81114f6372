"""This example trains on six objectives, or those named, on a toy whose accepted lengths are known exactly.

The target is a small autoregressive model that, in each of 24 contexts,
continues with one of a few "sentences" of B = 6 tokens, now and then atomic_write
a token. The drafter, like DFlash, proposes all positions at once and cannot
make one depend on another: it can imitate the mixture position by position, or
commit to sentences that hold together. Every objective sees the same blocks,
sampled from the target; afterwards the expected accepted lengths are computed
exactly, by enumerating every block.

    make example                                         (or: python examples/toy.py)
    python examples/toy.py ce bv token-bv e2e-tv dpace   any objectives, the first one as the baseline
"""

import argparse
import itertools

import torch
from torch import Tensor

from blockdraft.losses import Annealing, Blocks, objective, objective_names

VOCAB_SIZE, BLOCK_SIZE, NUM_CONTEXTS, NUM_SENTENCES = 5, 6, 24, 3
NUM_STEPS, BATCH_SIZE, LEARNING_RATE, NOISE = 400, 128, 0.1, 0.15


class Target:
    """p(token | context, prefix): a mixture of noisy sentences; the prefix tells which one it may be."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        shape = (NUM_CONTEXTS, NUM_SENTENCES)
        sentences = torch.randint(VOCAB_SIZE, (*shape, BLOCK_SIZE), generator=g)
        clean = torch.nn.functional.one_hot(sentences, VOCAB_SIZE).double()
        self.token_laws = (1 - NOISE) * clean + NOISE / VOCAB_SIZE  # [C, M, B, V]
        self.weights = (0.7 * torch.randn(shape, generator=g, dtype=torch.float64)).softmax(-1)

    def log_probs(self, contexts: Tensor, paths: Tensor) -> Tensor:
        """``[N, B, V]`` conditionals along the paths ``[N, B]``."""
        laws = self.token_laws[contexts]
        seen = laws.gather(-1, paths[:, None, :, None].expand(-1, NUM_SENTENCES, -1, 1)).squeeze(-1)
        before = torch.nn.functional.pad(seen.cumprod(-1), (1, 0), value=1.0)[..., :-1]
        posterior = self.weights[contexts].unsqueeze(-1) * before
        posterior = posterior / posterior.sum(1, keepdim=True)
        return (posterior.unsqueeze(-1) * laws).sum(1).log()

    def sample(self, num_blocks: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Contexts ``[N]`` and blocks ``[N, B]``."""
        contexts = torch.randint(NUM_CONTEXTS, (num_blocks,), generator=generator)
        sentence = torch.multinomial(self.weights[contexts], 1, generator=generator).squeeze(1)
        laws = self.token_laws[contexts, sentence].flatten(0, 1)
        return contexts, torch.multinomial(laws, 1, generator=generator).view(num_blocks, BLOCK_SIZE)


def train(name: str, target: Target) -> Tensor:
    """A drafter's logits ``[C, B, V]``, from zero, by Adam on sampled blocks."""
    logits = torch.zeros(NUM_CONTEXTS, BLOCK_SIZE, VOCAB_SIZE, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=LEARNING_RATE)
    annealing = Annealing(NUM_STEPS)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        logits += 0.3 * torch.randn(logits.shape, generator=generator)
    for step in range(NUM_STEPS):
        contexts, blocks = target.sample(BATCH_SIZE, generator)
        loss = annealing.apply(objective(name))(
            logits[contexts], target.log_probs(contexts, blocks).float(), blocks
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        annealing.advance()
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / NUM_STEPS)
    return logits.detach().double()


@torch.no_grad()
def exact(logits: Tensor, target: Target) -> dict[str, float]:
    """Accuracy and expected accepted lengths over all blocks of all contexts, each weighed by its probability."""
    paths = torch.tensor(list(itertools.product(range(VOCAB_SIZE), repeat=BLOCK_SIZE)))
    results = []
    for context in range(NUM_CONTEXTS):
        log_p = target.log_probs(torch.full((len(paths),), context), paths)
        blocks = Blocks(logits[context].expand_as(log_p), log_p, paths)
        accuracy = (logits[context].argmax(-1) == paths).double().mean(-1)
        lengths = torch.stack([accuracy, blocks.log_token.exp().sum(-1), blocks.log_integrated.exp().sum(-1)])
        results.append(lengths @ blocks.log_p.sum(-1).exp())
    mean = torch.stack(results).mean(0)
    return dict(zip(("accuracy", "token", "block"), mean.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a toy drafter with each objective and compare exact lengths.")
    parser.add_argument(
        "names",
        nargs="*",
        default=["ce", "kl", "rkl", "tv", "lk", "bv"],
        metavar="name",
        help=f"objectives to compare; known: {', '.join(objective_names())}",
    )
    names = parser.parse_args().names
    target = Target(seed=0)
    print(f"{BLOCK_SIZE} tokens a block; expected number accepted, exact\n")
    print(f"objective   token accuracy   token verification   block verification   over {names[0].upper()}")
    baseline = None
    for name in names:
        result = exact(train(name, target), target)
        baseline = baseline or result["block"]
        gain = result["block"] / baseline - 1
        print(
            f"{name:<9}   {result['accuracy']:14.3f}   {result['token']:18.3f}   {result['block']:18.3f}   {gain:+7.1%}"
        )


if __name__ == "__main__":
    main()
