"""Say what engines do with an exported drafter, and let a DFlash drafter assist transformers' own ``generate``.

What engines do was read from the released packages: vLLM 0.32.0, SGLang 0.5.23, transformers 5.22. The defaults of
both servers throw away what block verification gains, so every command here states its settings.

transformers 5.22 drafts with ``generate(assistant_model=..., speculation_type="dflash")``, with no engine and no export
in between. Each round it hands the assistant the target's features of newly committed tokens and the embeddings of
``[anchor, MASK, MASK, ..]``, takes the hidden states back, drops that of slot 0, and applies the target's head.
Verification is its own: greedy, or token by token with ``do_sample=True``.
"""

import json
import shlex
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, Qwen3Config
from transformers.modeling_outputs import BaseModelOutput

from blockdraft.drafters import Drafter, DrafterConfig, SlotLayout
from blockdraft.drafters.backbone import Attend, Layer
from blockdraft.drafters.formats import Format
from blockdraft.errors import BUILT_IN, BlockdraftError

BLOCK: dict[str, str | int] = {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}
"""vLLM's two settings for block verification of sampled drafts."""

STATE_SAMPLING = (
    "Servers apply the target's generation_config.json to requests that do not state every sampling field: send "
    "temperature, top_p and top_k."
)


def built_in_note(target: str) -> str | None:
    """Say how engines come to a built-in target, which no hub knows by its name; None for any other target."""
    if target not in BUILT_IN:
        return None
    return (
        f"{target} is built into blockdraft. Before you serve it, write it as a folder that engines can load, where "
        f"you start the engine: blockdraft export-target {target} --out {target}"
    )


@dataclass(frozen=True)
class EngineNote:
    """Says what one engine does with an exported drafter at temperatures above 0.

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
        """Give one line: the engine and what it does."""
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
        "import blockdraft as bd\n"
        f"target = bd.load_target({target!r})\n"
        f"assistant = bd.as_assistant(bd.load_drafter({drafter!r}, target))\n"
        "target.model.generate(\n"
        '    **inputs, assistant_model=assistant, speculation_type="dflash", do_sample=True, top_k=0\n'
        ")"
    )
    notes = ("It verifies token by token; blockdraft's own generate() verifies blocks.",)
    return EngineNote(engine, True, "sampled", "token", command, notes, language="python")


class DFlashAssistant(nn.Module):
    """Answer transformers' calls with a drafter's hidden states; it shares the drafter's weights.

    config: what transformers asks of an assistant: ``target_layer_ids`` (decoder outputs, counted from 0),
        ``block_size`` (slots, the anchor's among them), ``mask_token_id``, and the layers its cache is made for.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        own = drafter.config
        self.drafter = drafter
        self.config = Qwen3Config(
            hidden_size=own.hidden_size,
            intermediate_size=own.intermediate_size,
            num_hidden_layers=own.num_layers,
            num_attention_heads=own.num_heads,
            num_key_value_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            vocab_size=own.vocab_size,
        )
        self.config.target_layer_ids = list(own.target_layers)
        self.config.block_size = own.num_slots
        self.config.mask_token_id = own.mask_token_id

    @property
    def device(self) -> torch.device:
        """Tell where the drafter is."""
        return self.drafter.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Give the dtype of the drafter's weights."""
        return self.drafter.fc.weight.dtype

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache,
        **_ignored: Any,
    ) -> BaseModelOutput:
        """Run one block.

        Args:
            noise_embeds: ``[1, S, H]``, the target's embeddings of the anchor and the masks.
            context_hidden_states: ``[1, T, K * H]``, features of the tokens committed since the last call.
            position_ids: ``[1, T + S]``, of both.
            attention_mask: ``[1, P + T + S]``, the P positions in the cache included, 0 where padding stands; or None.
            past_key_values: keys and values of the context; the block's are appended too, and cropped by the caller.

        Returns:
            ``last_hidden_state`` ``[1, S, H]`` of all slots.
        """
        drafter, num_new = self.drafter, context_hidden_states.shape[1]
        context = drafter.hidden_norm(drafter.fc(context_hidden_states.to(self.dtype)))
        context_rotary, rotary = (
            drafter.rotary(positions, self.dtype)
            for positions in (position_ids[:, :num_new], position_ids[:, num_new:])
        )
        visible = None if attention_mask is None else attention_mask[:, None, None].bool()
        x = noise_embeds.to(self.dtype)
        for index, layer in enumerate(drafter.layers):
            assert isinstance(layer, Layer)
            x = layer(x, rotary, context, context_rotary, _attend(past_key_values, index, visible))
        return BaseModelOutput(last_hidden_state=drafter.norm(x).to(noise_embeds.dtype))


def _attend(cache: Cache, index: int, visible: Tensor | None) -> Attend:
    """Return the attention of one block to the cached context, the new context and itself."""

    def run(q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        keys, values = cache.update(torch.cat([context_k, k], 2), torch.cat([context_v, v], 2), index)
        return scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)

    return run


def as_assistant(drafter: Drafter) -> DFlashAssistant:
    """Return a drafter in the form that transformers' ``generate`` takes as ``assistant_model``.

    The target is any causal language model that `load_target` accepts; Qwen3, Qwen2 and Llama are tested::

        target = blockdraft.targets.load_target("Qwen/Qwen3-4B")
        assistant = as_assistant(load_drafter("runs/x", target))
        target.model.generate(**inputs, assistant_model=assistant, speculation_type="dflash", do_sample=True)

    Its verification is token by token; `blockdraft.decoding.generate` verifies blocks. Only DFlash drafters can be
    assistants: transformers has no Markov head.
    """
    if drafter.config.kind != "dflash":
        raise BlockdraftError(
            "a DSpark drafter cannot be an assistant of transformers, which has no Markov head; decode with "
            "blockdraft.decoding.generate"
        )
    if drafter.config.slot_layout is not SlotLayout.FILL_IN:
        raise BlockdraftError(
            "slot 0 of this drafter predicts a token, and transformers discards slot 0; decode with "
            "blockdraft.decoding.generate"
        )
    return DFlashAssistant(drafter).eval()
