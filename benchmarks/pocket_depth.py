"""How deep should pocket be? Tokens per round at which speculative decoding breaks even, by depth and width.

Random weights, one thread. For each shape of the target, a round's phases with an untrained drafter
(`blockdraft.decoding.generate` records them) against one token without a drafter, interleaved:

    break-even = (draft + verify + rest) / (one autoregressive token)

    python benchmarks/pocket_depth.py
"""

import argparse
import statistics

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from blockdraft.decoding import generate
from blockdraft.drafters import Drafter, DrafterConfig, build_drafter
from blockdraft.pocket import MODEL_FOLDER
from blockdraft.targets import Target

SHAPES = ("6x192x512", "12x192x512", "16x192x512", "20x192x512", "24x192x512", "16x256x640", "20x224x512")
"""Layers, width and MLP of the targets."""

PHASES = ("draft", "verify", "rest")


def random_target(shape: str) -> Target:
    """Return a target of this shape with pocket's tokenizer and random weights."""
    layers, width, mlp = map(int, shape.split("x"))
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    config = Qwen3Config(
        vocab_size=2048, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=width // 4, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return Target(Qwen3ForCausalLM(config), tokenizer, name=shape)


def milliseconds(target: Target, drafter: Drafter | None, prompt: list[int], seed: int) -> dict[str, float]:
    """Return the median milliseconds per round, by phase, over one generation."""
    out = generate(target, drafter, prompt, max_new_tokens=48, seed=seed)
    return {phase: 1000 * statistics.median(each.seconds[phase] for each in out.rounds) for phase in PHASES}


def main() -> None:
    """Print one row per target and drafter, all measured in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="layers x width x MLP of the targets")
    parser.add_argument("--drafters", nargs="+", default=["2x8", "3x8", "2x10", "3x10"], help="layers x proposals")
    parser.add_argument("--turns", type=int, default=7, help="times that everything is measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompt = list(range(10, 130))
    targets = {shape: random_target(shape) for shape in options.shapes}
    drafters: dict[tuple[str, str], Drafter | None] = {}
    for shape, target in targets.items():
        drafters[shape, ""] = None
        for name in options.drafters:
            layers, proposals = map(int, name.split("x"))
            changes = {"num_layers": layers, "num_proposals": proposals, "num_features": 3}
            drafters[shape, name] = build_drafter(DrafterConfig.for_target("dflash", target, **changes)).eval()
    taken: dict[tuple[str, str], list[dict[str, float]]] = {key: [] for key in drafters}
    for turn in range(options.turns + 1):
        for (shape, name), drafter in drafters.items():
            found = milliseconds(targets[shape], drafter, prompt, turn)
            if turn:  # the first turn warms up
                taken[shape, name].append(found)
    print("| target | MB in bfloat16 | drafter | token ms | draft | verify | rest | break-even |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for (shape, name), found in taken.items():
        phases = {phase: statistics.median(each[phase] for each in found) for phase in PHASES}
        if not name:
            token = sum(phases.values())
            continue
        size = 2 * sum(parameter.numel() for parameter in targets[shape].model.parameters()) / 1e6
        cells = " | ".join(f"{phases[phase]:.1f}" for phase in PHASES)
        print(f"| {shape} | {size:.1f} | {name} | {token:.1f} | {cells} | {sum(phases.values()) / token:.2f} |")


if __name__ == "__main__":
    main()
