"""vLLM on a CPU, in an environment of its own: the interpreter, questions, and texts decoded by it."""

import json
import os
import subprocess
from pathlib import Path

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
GENERATE = Path(__file__).with_name("vllm_generate.py")

QUESTIONS = (
    "Say hi.",
    "Name three colours.",
    "What is the capital of France?",
    "Write one line about rain.",
    "How many legs has a spider?",
    "Give me a word that rhymes with light.",
    "What does a baker do?",
    "Tell me a very short story.",
)


def run_vllm(folder, target, speculative, prompts, *, one_by_one=False, repair=False, **sampling):
    """vLLM's tokens, seconds and counters; or what it said, if it did not start.

    Args:
        folder: for the files of the exchange.
        target: a Hugging Face folder.
        speculative: its --speculative-config, or None.
        prompts: token ids.
        one_by_one: a batch of one instead of all prompts at once.
        repair: mend the CPU runner's temperatures first; see vllm_generate.py.
        sampling: fields of its SamplingParams.
    """
    job, result = folder / "job.json", folder / "result.json"
    result.unlink(missing_ok=True)
    values = {"target": str(target), "speculative": speculative, "prompts": prompts, "sampling": sampling}
    job.write_text(json.dumps(values | {"one_by_one": one_by_one, "repair": repair}))
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip
    command = [str(PYTHON), str(GENERATE), str(job), str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return json.loads(result.read_text()) if result.exists() else done.stdout + done.stderr
