"""Tiny models of real families, with a word-level tokenizer."""

import functools

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

from blockdraft.drafters import Anchors, Drafter, DrafterConfig, build_drafter
from blockdraft.losses import fused_linear_objective, objective
from blockdraft.targets import Target

FAMILIES = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}
EOS, PAD, MASK = 0, 1, 2

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def tiny_model(family="qwen3", *, vocab_size=40, num_layers=6, seed=0, eos=EOS, **changes):
    """A model with logits spread enough that its text is not uniform noise."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": eos,
        "bos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.15,
    }
    if family == "qwen3":
        sizes["head_dim"] = 8
    model = AutoModelForCausalLM.from_config(FAMILIES[family](**(sizes | changes)))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    return model.eval()


@functools.cache
def tiny_tokenizer(vocab_size=40):
    words = ["<eos>", "<pad>", "<mask>", "user", "assistant", *(f"w{i}" for i in range(5, vocab_size))]
    raw = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="w5"))
    raw.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", mask_token="<mask>", unk_token="w5"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_target(family="qwen3", *, vocab_size=40, dtype=torch.float64, tokenizer=True, mask_token_id=None, **options):
    model = tiny_model(family, vocab_size=vocab_size, **options).to(dtype)
    return Target(
        model, tiny_tokenizer(vocab_size) if tokenizer else None, name=f"tiny {family}", mask_token_id=mask_token_id
    )


def tiny_drafter(kind, target, *, seed=1, **changes) -> Drafter:
    torch.manual_seed(seed)
    options = {"num_layers": 2, "num_proposals": 4, "num_features": 3}
    if kind == "dspark":
        options["markov_rank"] = 6
    drafter = build_drafter(DrafterConfig.for_target(kind, target, **(options | changes)))
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return drafter.to(target.dtype).eval()


def overfit(drafter, target, text, prompt_length, *, num_steps, rate) -> Drafter:
    """Train on every block of one text, written out as a loop of its own."""
    num = drafter.config.num_proposals
    tokens = torch.tensor([text])
    output = target.forward(tokens, layers=drafter.config.target_layers)
    position = torch.arange(prompt_length, len(text) - num)
    anchors = Anchors.of(torch.zeros_like(position), position)
    at = position[:, None] + torch.arange(num + 1)
    path = tokens[0, at]
    optimizer = torch.optim.AdamW(drafter.train().parameters(), lr=rate)
    for _ in range(num_steps):
        hidden = drafter(output.features, path[:, 0], anchors, target)
        value = fused_linear_objective(
            objective("ce"), hidden, output.hidden[0, at[:, :-1]], target.head, target.head, path[:, 1:],
            markov=drafter.markov(hidden, path[:, :-1]),
        )  # fmt: skip
        optimizer.zero_grad()
        value.loss.backward()
        optimizer.step()
    return drafter.eval()
