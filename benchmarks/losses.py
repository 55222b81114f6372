"""Objectives at the vocabulary of Qwen3: fused, as plain autograd, beside Liger, and beside the floor.

    make bench                                   # everything, to stdout and results/losses.json
    python benchmarks/losses.py --case bv-fused  # one case, in this process, as JSON

One step is the value and the gradient of the draft hidden states, heads frozen
unless the case says otherwise: 32 blocks of 15 positions, V = 151,936, H = 1,024,
float32, two threads. The floor is the three matrix products no such step can
do without (draft logits, target logits, gradient of the hidden states), each
over all 480 rows at once. Fused cases also return the acceptance statistics.
Reduced cases draft from 8,192 of the tokens; the target's log normaliser over all
of them is stored beside its features, or computed in the step.
"""

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.losses import ReducedTarget, fused_linear_objective, objective, restrict_target
from blockdraft.losses.head_products import TargetIndex

from measuring import measure, save, table, take_turns

NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE, WIDTH, THREADS = 32, 15, 151_936, 1_024, 2
REDUCED_SIZE = 8_192


@dataclass
class Problem:
    draft_hidden: Tensor
    target_hidden: Tensor
    draft_head: Tensor
    target_head: Tensor
    labels: Tensor

    @classmethod
    def random(cls) -> "Problem":
        torch.manual_seed(0)
        hidden = [torch.empty(NUM_BLOCKS, BLOCK_SIZE, WIDTH).normal_() for _ in range(2)]
        heads = [torch.empty(VOCAB_SIZE, WIDTH).normal_(std=0.03) for _ in range(2)]
        labels = torch.randint(VOCAB_SIZE, (NUM_BLOCKS, BLOCK_SIZE))
        hidden[0] @ heads[0][:64].T  # the matrix library's own buffers, before anything is counted
        return cls(hidden[0].requires_grad_(), hidden[1], heads[0], heads[1], labels)

    def logits(self) -> tuple[Tensor, Tensor]:
        return self.draft_hidden @ self.draft_head.T, self.target_hidden @ self.target_head.T


def floor(head_trains: bool) -> Callable[[Problem], None]:
    """The products alone."""

    def step(data: Problem) -> None:
        with torch.no_grad():
            rows = data.draft_hidden.view(-1, WIDTH)
            logits = rows @ data.draft_head.T
            torch.mm(data.target_hidden.view(-1, WIDTH), data.target_head.T, out=logits)
            logits @ data.draft_head
            if head_trains:
                logits.T @ rows

    return step


def fused(name: str, **options: bool) -> Callable[[Problem], None]:
    def step(data: Problem) -> None:
        obj = objective(name, **options)
        fused_linear_objective(
            obj, data.draft_hidden, data.target_hidden, data.draft_head, data.target_head, data.labels
        ).loss.backward()

    return step


def fused_with_head(data: Problem) -> None:
    data.draft_head.requires_grad_()
    data.draft_head.grad = None
    fused("bv")(data)


def fused_reduced(*, stored: bool) -> Callable[[Problem], None]:
    """BV with a drafter over the first tokens alone."""

    def step(data: Problem) -> None:
        draft_ids, labels = torch.arange(REDUCED_SIZE), data.labels % REDUCED_SIZE
        if stored:
            reduced = ReducedTarget(torch.full(labels.shape, 12.5), labels)
        else:
            reduced = restrict_target(data.target_hidden, data.target_head, draft_ids)
        heads = data.draft_head[:REDUCED_SIZE], data.target_head[:REDUCED_SIZE]
        fused_linear_objective(
            objective("bv"), data.draft_hidden, data.target_hidden, *heads, labels, reduced=reduced
        ).loss.backward()

    return step


def fused_overlapping(*, shared: bool) -> Callable[[Problem], None]:
    """BV on blocks that start at every second token, as the paper's recipes place them, 84 target rows for 480."""

    def step(data: Problem) -> None:
        rows = 2 * torch.arange(NUM_BLOCKS)[:, None] + torch.arange(BLOCK_SIZE)
        hidden = data.target_hidden.view(-1, WIDTH)
        index = TargetIndex(rows) if shared else None
        fused_linear_objective(
            objective("bv"), data.draft_hidden, hidden if shared else hidden[rows], data.draft_head, data.target_head,
            data.labels, target_index=index,
        ).loss.backward()  # fmt: skip

    return step


def plain_ce(data: Problem) -> None:
    logits = data.draft_hidden @ data.draft_head.T
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), data.labels.flatten()).backward()


def plain_kl(data: Problem) -> None:
    draft, target = (x.log_softmax(-1) for x in data.logits())
    torch.nn.functional.kl_div(draft, target, log_target=True, reduction="sum").backward()


def plain_lk(data: Problem) -> None:
    draft, target = (x.softmax(-1) for x in data.logits())
    (-torch.minimum(draft, target).sum(-1).log()).mean().backward()


def plain_bv(data: Problem) -> None:
    """Integrated block-log BV as one would first write it."""
    draft, target = (x.log_softmax(-1) for x in data.logits())
    at = data.labels.unsqueeze(-1)
    log_r = torch.nn.functional.pad((draft.gather(-1, at) - target.gather(-1, at)).squeeze(-1).cumsum(-1), (1, 0))
    state = (log_r.cummin(-1).values - log_r)[:, :-1, None].exp()
    survived = torch.minimum(state * target.exp(), draft.exp()).sum(-1)
    log_scores = log_r[:, :-1] + survived.log()
    (math.log(BLOCK_SIZE) - log_scores.logsumexp(-1)).mean().backward()


def liger(chunk_size: int) -> Callable[[Problem], None]:
    """Liger's chunked distillation loss as KL(p || q), not compiled; it always computes the head's gradient."""

    def step(data: Problem) -> None:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        loss = LigerFusedLinearJSDLoss(
            weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=False, chunk_size=chunk_size
        )
        rows = [x.view(-1, WIDTH) for x in (data.draft_hidden, data.target_hidden)]
        loss(rows[0], data.draft_head, rows[1], data.target_head, data.labels.view(-1)).backward()

    return step


CASES: dict[str, Callable[[Problem], None]] = {
    "floor": floor(head_trains=False),
    "bv-fused": fused("bv"),
    "bv-fused, control variate": fused("bv", control_variate=True),
    "kl-fused": fused("kl"),
    "lk-fused": fused("lk"),
    "ce-fused": fused("ce"),
    "bv-fused, reduced": fused_reduced(stored=True),
    "bv-fused, reduced, normaliser in the step": fused_reduced(stored=False),
    "bv-fused, overlapping blocks": fused_overlapping(shared=False),
    "bv-fused, overlapping blocks, rows shared": fused_overlapping(shared=True),
    "bv-plain": plain_bv,
    "kl-plain": plain_kl,
    "lk-plain": plain_lk,
    "ce-plain": plain_ce,
    "floor, head trained": floor(head_trains=True),
    "bv-fused, head trained": fused_with_head,
    "liger-kl, default chunk": liger(1024),
    "liger-kl, chunk of 165 rows": liger(165),
}


def report(results: dict[str, dict[str, float]]) -> str:
    rows = []
    for case, r in results.items():
        base = results["floor, head trained" if "head" in case or "liger" in case else "floor"]
        rows.append(
            [
                case,
                f"{r['median']:.2f} s",
                f"{r['median'] / base['median']:.2f}",
                f"{r['extra_bytes'] / 2**20:,.0f} MiB",
                f"{r['extra_bytes'] / results['bv-plain']['extra_bytes']:.3f}",
            ]
        )
    return table(["case", "median time", "over its floor", "extra memory", "over plain BV"], rows)


def goals(results: dict[str, dict[str, float]]) -> list[tuple[str, float, float]]:
    """(what, measured, at most)."""
    bv, kl, plain, base = (results[c] for c in ("bv-fused", "kl-fused", "bv-plain", "floor"))
    apart, shared = (results[f"bv-fused, overlapping blocks{c}"] for c in ("", ", rows shared"))
    return [
        ("extra memory, fused BV / plain BV", bv["extra_bytes"] / plain["extra_bytes"], 1 / 8),
        ("time, fused BV / plain BV", bv["median"] / plain["median"], 1.0),
        ("time, fused BV / floor", bv["median"] / base["median"], 1.5),
        ("time, fused BV / fused KL", bv["median"] / kl["median"], 1.15),
        ("time, rows shared / not", shared["median"] / apart["median"], 1.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="measure this case alone, in this process")
    parser.add_argument("--rounds", type=int, default=4, help="turns of every case (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    if arguments.case:
        data = Problem.random()
        json.dump(measure(lambda: CASES[arguments.case](data)), sys.stdout)
        return
    cases = list(CASES)
    if importlib.util.find_spec("liger_kernel") is None:
        print("liger-kernel is not installed: its cases are left out", file=sys.stderr)
        cases = [case for case in cases if not case.startswith("liger")]
    results = take_turns(__file__, cases, arguments.rounds)
    checks = goals(results)
    print(report(results))
    print()
    print(
        table(
            ["goal", "measured", "at most", ""],
            [[what, f"{got:.3f}", f"{most:.3f}", "reached" if got <= most else "missed"] for what, got, most in checks],
        )
    )
    shape = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "vocab_size": VOCAB_SIZE, "width": WIDTH}
    path = save("losses", {"shape": shape, "rounds": arguments.rounds, "cases": results, "goals": checks})
    print(f"\nwritten to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
