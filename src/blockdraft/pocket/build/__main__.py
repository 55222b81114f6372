"""This command makes pocket from its seed: ``python -m blockdraft.pocket.build --out build/pocket``.

It trains the tokenizer, then the model, measures it, and leaves an ordinary Hugging Face folder. Run it again to
resume after an interruption.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from blockdraft.pocket.build.text import END, PAD, encode_conversation, render, save_tokenizer, train_tokenizer
from blockdraft.pocket.build.training import PocketTrainer, Settings, SettingsError, Stage
from blockdraft.pocket.corpus import FAMILIES, Example, heldout
from blockdraft.pocket.corpus.arithmetic import parse_answer
from blockdraft.pocket.corpus.functions import fulfils, parses
from blockdraft.pocket.corpus.knowledge import is_right

PAUSED = 3
"""Exit code when the minutes are over before the steps are."""

MAX_BYTES = 24_000_000
"""Largest weights that may be shipped."""

CHAT_KINDS = ("definition", "definitions", "comparison", "fact", "unknown")
"""The kinds of family ``chat`` whose answers are right or wrong."""

SAMPLES = (
    "What is a river?", "what is a river", "Tell me about rivers.", "What is a river, and what is a lake?",
    "What does a baker do?", "How many legs has a spider?", "What is the capital of France?",
    "What is speculative decoding?", "What is a quargle?", "Give me a word that rhymes with light.",
    "Write one line about rain.",
    "Tell me a very short story.", "Hello", "Hi", "Who are you?", "Thanks", "What is 3 + 4?",
    "Tom has 3 apples and buys 4 more. How many apples does he have?",
    "Write a Python function that reverses a string.", "How do I make a cup of tea?", "I cannot sleep. What can I do?",
)  # fmt: skip
"""Prompts of the documents and others that a person would try first; the quality file holds the answers to them."""


def build(
    settings: Settings,
    out: Path,
    *,
    minutes: float = math.inf,
    compiled: bool = False,
    num_prompts: int = 300,
    max_new_tokens: int = 256,
) -> bool:
    """Train, measure and write the folder; return False if time ran out and a checkpoint waits in ``out/run``."""
    tokenizer = train_tokenizer(seed=settings.seed)
    trainer = PocketTrainer(settings, tokenizer, out / "run", compiled=compiled)
    trainer.run(minutes=minutes)
    if not trainer.done:
        return False
    write_folder(trainer.model, tokenizer, out)
    print("measuring the quality on held-out prompts", file=sys.stderr, flush=True)
    shipped = Qwen3ForCausalLM.from_pretrained(out, dtype=torch.float32)
    quality = measure_quality(shipped, tokenizer, num_prompts, max_new_tokens)
    (out / "quality.json").write_text(json.dumps(quality, indent=2) + "\n")
    return True


def write_folder(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model in bfloat16, its tokenizer and the generation config."""
    rounded = Qwen3ForCausalLM(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.bfloat16()
    rounded.generation_config = GenerationConfig(
        eos_token_id=tokenizer.token_to_id(END), pad_token_id=tokenizer.token_to_id(PAD), do_sample=False
    )
    rounded.save_pretrained(out)
    save_tokenizer(tokenizer, out)
    weights = out / "model.safetensors"
    weights.chmod(0o644)
    size = weights.stat().st_size
    if size > MAX_BYTES:
        raise SettingsError(f"the weights take {size:,} bytes, more than the {MAX_BYTES:,} that may be shipped")


def measure_quality(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, num_prompts: int = 300, max_new_tokens: int = 256
) -> dict[str, Any]:
    """Measure the perplexity of held-out responses, and how many greedy answers are right.

    num_prompts: held-out prompts of each family for perplexity, of math, and of definitions; a third as many of code
        and of each other kind of chat.
    """
    model.eval()
    samples = {family: heldout(family, num_prompts) for family in FAMILIES}
    few = max(1, num_prompts // 3)
    math_answers = answers(model, tokenizer, prompts_of(samples["math"]), max_new_tokens)
    code = samples["code"][:few]
    functions = answers(model, tokenizer, prompts_of(code), max_new_tokens)
    right = {}
    for kind in CHAT_KINDS:
        asked = heldout("chat", num_prompts if kind == "definition" else few, kind)
        replies = answers(model, tokenizer, prompts_of(asked), max_new_tokens)
        right[kind] = sum(is_right(e.answer or "", reply) for e, reply in zip(asked, replies, strict=True)) / len(asked)
    passed = [fulfils(each.prompt, text, each.answer or "") for each, text in zip(code, functions, strict=True)]
    return {
        "num_prompts": num_prompts,
        "perplexity": {family: perplexity(model, tokenizer, samples[family]) for family in FAMILIES},
        "math_exact_answers_by_steps": exact_answers(samples["math"], math_answers),
        "code_that_parses": sum(map(parses, functions)) / len(functions),
        "code_that_passes_its_tests": sum(passed) / len(passed),
        "chat_right_by_kind": right,
        "samples": dict(zip(SAMPLES, answers(model, tokenizer, SAMPLES, max_new_tokens), strict=True)),
    }


def prompts_of(samples: Sequence[Example]) -> list[str]:
    """Return the prompts of examples."""
    return [example.prompt for example in samples]


@torch.no_grad()
def perplexity(model: Qwen3ForCausalLM, tokenizer: Tokenizer, samples: Sequence[Example]) -> float:
    """Return the perplexity per token of the responses, their end token included."""
    total, count = 0.0, 0
    for example in samples:
        conversation = encode_conversation(tokenizer, [(example.prompt, example.response)])
        tokens = torch.tensor([conversation.tokens])
        is_response = torch.tensor(conversation.weights[1:]) == 1
        losses = F.cross_entropy(model(input_ids=tokens).logits[0, :-1].float(), tokens[0, 1:], reduction="none")
        total += float(losses[is_response].sum())
        count += int(is_response.sum())
    return math.exp(total / count)


@torch.no_grad()
def answers(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompts: Sequence[str], max_new_tokens: int, batch_size: int = 25
) -> list[str]:
    """Return greedy responses to one-turn prompts, in batches that are padded on the left."""
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    generate = cast(Any, model).generate
    texts: list[str] = []
    for start in range(0, len(prompts), batch_size):
        rows = []
        for prompt in prompts[start : start + batch_size]:
            text = render([{"role": "user", "content": prompt}], add_generation_prompt=True)
            rows.append(tokenizer.encode(text).ids)
        width = max(map(len, rows))
        tokens = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
        seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        output: Tensor = generate(
            input_ids=tokens,
            attention_mask=seen,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=end,
            pad_token_id=pad,
        )
        replies = (row[: row.index(end)] if end in row else row for row in output[:, width:].tolist())
        texts += [tokenizer.decode(reply) for reply in replies]
    return texts


def exact_answers(samples: Sequence[Example], solutions: Sequence[str]) -> dict[str, float]:
    """Return the share of right answers, by the number of steps of the problem."""
    right: dict[str, list[bool]] = {}
    for example, solution in zip(samples, solutions, strict=True):
        right.setdefault(str(example.difficulty), []).append(str(parse_answer(solution)) == example.answer)
    return {steps: sum(marks) / len(marks) for steps, marks in sorted(right.items())}


class Parser(argparse.ArgumentParser):
    """Answers each mistake with one line."""

    def error(self, message: str) -> NoReturn:
        """Print the line and leave with exit code 2."""
        self.exit(2, f"error: {message} (see --help)\n")


def positive_int(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def positive_minutes(text: str) -> float:
    """Read a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number of minutes above 0, got {text!r}")
    return value


def stages(text: str) -> tuple[Stage, ...]:
    """Read stages such as ``6x2500,12x1500,24x3000``: layers and optimizer steps of each."""
    try:
        pairs = [tuple(map(positive_int, stage.split("x"))) for stage in text.split(",")]
        return tuple(Stage(num_layers, num_steps) for num_layers, num_steps in pairs)
    except (argparse.ArgumentTypeError, ValueError):
        raise argparse.ArgumentTypeError(f"expected layers x steps such as 6x2500,24x3000, got {text!r}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    default = Settings()
    parser = Parser(prog="python -m blockdraft.pocket.build", description="Make the pocket model from its seed.")
    parser.add_argument(
        "--out", type=Path, default=Path("build/pocket"), metavar="DIR", help="folder to write (%(default)s)"
    )
    shown = ",".join(f"{stage.num_layers}x{stage.num_steps}" for stage in default.stages)
    parser.add_argument(
        "--stages", type=stages, default=default.stages, metavar="LxN,..",
        help=f"layers and optimizer steps of each stage of training ({shown})",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=positive_minutes, default=math.inf, metavar="M",
        help=f"pause after this number of minutes with exit code {PAUSED}; the same command resumes",
    )  # fmt: skip
    parser.add_argument("--threads", type=positive_int, default=2, metavar="N", help="threads of PyTorch (%(default)s)")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the layers, which saves a quarter of the time; needs a C++ compiler",
    )
    options = parser.parse_args(arguments)
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is a file; give a folder")
    torch.set_num_threads(options.threads)
    disable_progress_bar()
    try:
        settings = replace(default, stages=options.stages)
        finished = build(settings, options.out, minutes=options.minutes, compiled=options.compile)
    except SettingsError as problem:
        parser.error(str(problem))
    except KeyboardInterrupt:
        print("interrupted; the same command resumes from the last checkpoint", file=sys.stderr)
        return 130
    if not finished:
        print(f"paused after {options.minutes:g} minutes; the same command resumes", file=sys.stderr)
        return PAUSED
    print((options.out / "quality.json").read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
