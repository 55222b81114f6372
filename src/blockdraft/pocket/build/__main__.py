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
from typing import NoReturn

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from blockdraft.pocket.build.quality import measure_quality
from blockdraft.pocket.build.text import END, PAD, save_tokenizer, train_tokenizer
from blockdraft.pocket.build.training import PocketTrainer, Settings, SettingsError, Stage

PAUSED = 3
"""Exit code when the minutes are over before the steps are."""

MAX_BYTES = 24_000_000
"""Largest weights that may be shipped."""


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
