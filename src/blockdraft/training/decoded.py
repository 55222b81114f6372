"""Held-out prompts decoded for real, while training goes on."""

from typing import Any

from blockdraft.data import TextDataset
from blockdraft.decoding import generate
from blockdraft.drafters import Drafter
from blockdraft.targets import Target

MAX_NEW_TOKENS = 128


class Decoded:
    """The first few held-out prompts, under block verification.

    Generators of its own and the same ones every time: two measurements differ by the drafter alone, and
    training's random state is not touched.
    """

    def __init__(self, paths: TextDataset, num_prompts: int, target: Target, temperature: float, seed: int) -> None:
        self.prompts = [paths[i][: paths.prompt_lengths[i]].tolist() for i in range(num_prompts)]
        self.target, self.temperature, self.seed = target, temperature, seed

    def measure(self, drafter: Drafter) -> dict[str, Any]:
        """Tokens retained per verification call, pooled over the prompts, and the first text."""
        drafter.eval()
        found = [
            generate(
                self.target, drafter, prompt, temperature=self.temperature, max_new_tokens=MAX_NEW_TOKENS,
                seed=self.seed + number,
            )
            for number, prompt in enumerate(self.prompts)
        ]  # fmt: skip
        drafter.train()
        rounds = [each for out in found for each in out.rounds]
        length = sum(len(each.tokens) for each in rounds) / max(1, len(rounds))
        return {"decoded_length_block": length, "decoded_text": found[0].text}
