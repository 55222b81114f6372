"""What serving engines do with an exported drafter, and the commands that make the most of it.

Read from the released packages: vLLM 0.32.0, SGLang 0.5.23, transformers 5.22. The defaults of both servers throw away
what block verification gains, so every command here states its settings.
"""

import json
import shlex
from dataclasses import dataclass

from blockdraft.drafters import DrafterConfig, SlotLayout
from blockdraft.drafters.formats import Format

BLOCK: dict[str, str | int] = {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}
"""vLLM's two settings for block verification of sampled drafts."""

STATE_SAMPLING = (
    "Servers apply the target's generation_config.json to requests that do not state every sampling field: send "
    "temperature, top_p and top_k."
)


@dataclass(frozen=True)
class EngineNote:
    """What one engine does with an exported drafter at temperatures above 0.

    engine: its name, and the version whose sources were read.
    served: whether it can read and run the folder.
    drafts: ``sampled`` from the drafter's distribution, or ``greedy``, its argmax; None if it is not served.
    verification: ``block`` or ``token``, under the command; None if it is not served.
    command: how to serve it, on the command line or in Python; None if it is not served.
    notes: what to watch for; the reason, if it is not served.
    language: of the command, ``sh`` or ``python``.
    """

    engine: str
    served: bool
    drafts: str | None
    verification: str | None
    command: str | None
    notes: tuple[str, ...]
    language: str = "sh"

    @classmethod
    def unserved(cls, engine: str, reason: str) -> "EngineNote":
        """Say that an engine cannot serve this folder, and why."""
        return cls(engine, False, None, None, None, (reason,))

    @property
    def summary(self) -> str:
        """One line: the engine and what it does."""
        if not self.served:
            return f"{self.engine} does not serve this folder: {self.notes[0]}"
        return f"{self.engine}: {self.drafts} drafts, {self.verification} verification"


def engine_notes(config: DrafterConfig, flavour: Format, target: str, drafter: str) -> list[EngineNote]:
    """Return what each engine does with a drafter.

    Args:
        config: of the drafter.
        flavour: the format it was exported in.
        target, drafter: names or paths to put into the commands.
    """
    return [
        _vllm(config, target, drafter),
        _sglang(config, flavour, target, drafter),
        _transformers(config, target, drafter),
    ]


def vllm_config(config: DrafterConfig, drafter: str, *, block: bool = False) -> dict[str, str | int]:
    """Return vLLM's ``--speculative-config``; its default verifies tokens one by one and drafts greedily."""
    plain: dict[str, str | int] = {
        "method": config.kind,
        "model": drafter,
        "num_speculative_tokens": config.num_proposals,
    }
    return plain | BLOCK if block else plain


def vllm_command(config: DrafterConfig, target: str, drafter: str) -> str:
    """Return vLLM's command for block verification with sampled drafts."""
    settings = json.dumps(vllm_config(config, drafter, block=True))
    return f"vllm serve {shlex.quote(target)} --speculative-config \\\n    {shlex.quote(settings)}"


def sglang_command(config: DrafterConfig, target: str, drafter: str) -> str:
    """Return SGLang's command; it counts the anchor's slot in DFlash's draft tokens, but not in DSpark's block size."""
    settings = (
        f"--speculative-num-draft-tokens {config.num_slots}"
        if config.kind == "dflash"
        else f"--speculative-dspark-block-size {config.num_proposals} --speculative-use-block-verification"
    )
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} \\\n"
        f"    --speculative-algorithm {config.kind.upper()} --speculative-draft-model-path {shlex.quote(drafter)} \\\n"
        f"    {settings}"
    )


def _vllm(config: DrafterConfig, target: str, drafter: str) -> EngineNote:
    engine = "vLLM 0.32"
    if config.markov_head in ("gated", "rnn"):
        return EngineNote.unserved(engine, f"it has the vanilla Markov head only; this one is {config.markov_head}")
    refused = "refuses DSpark" if config.kind == "dspark" else 'accepts "block", ignores it, and drafts greedily'
    defaults = (
        "Keep both settings of the command: by default vLLM drafts greedily and verifies token by token, and with "
        "greedy drafts block verification gains nothing."
    )
    runner = f"Both need the V2 model runner, the default where Triton runs; the V1 runner of CPU builds {refused}."
    return EngineNote(engine, True, "sampled", "block", vllm_command(config, target, drafter), (defaults, runner))


def _sglang(config: DrafterConfig, flavour: Format, target: str, drafter: str) -> EngineNote:
    engine = "SGLang 0.5.23"
    if flavour == "speculators":
        reason = "it does not read this format; `blockdraft export --format flat` writes the one it reads"
        return EngineNote.unserved(engine, reason)
    command = sglang_command(config, target, drafter)
    if config.kind == "dflash":
        note = (
            "SGLang takes the argmax of a DFlash drafter at every temperature, so --speculative-use-block-verification "
            "has no effect and what training for block verification gained is lost. vLLM samples the same drafter."
        )
        return EngineNote(engine, True, "greedy", "token", command, (note,))
    note = (
        "Keep --speculative-use-block-verification: by default SGLang verifies token by token. It needs CUDA or ROCm."
    )
    return EngineNote(engine, True, "sampled", "block", command, (note,))


def _transformers(config: DrafterConfig, target: str, drafter: str) -> EngineNote:
    engine = "transformers 5.22"
    if config.kind == "dspark":
        return EngineNote.unserved(engine, "its generate() has no Markov head; blockdraft's own generate() has")
    if config.slot_layout is not SlotLayout.FILL_IN:
        return EngineNote.unserved(engine, "its generate() discards slot 0, which predicts a token here")
    command = (
        f"target = bd.load_target({target!r})\n"
        f"assistant = bd.as_assistant(bd.load_drafter({drafter!r}, target))\n"
        'target.model.generate(**inputs, assistant_model=assistant, speculation_type="dflash", do_sample=True)'
    )
    notes = ("It verifies token by token; blockdraft's own generate() verifies blocks.",)
    return EngineNote(engine, True, "sampled", "token", command, notes, language="python")
