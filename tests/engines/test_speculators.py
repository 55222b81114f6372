"""Exported drafters in the package speculators: no tensor missing or unexpected, our logits from its own forward."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.drafters import Anchors, DrafterConfig, SlotLayout, build_drafter, load_drafter
from blockdraft.drafters.formats import frozen_names
from blockdraft.export import export_drafter, export_target
from blockdraft.losses import objective
from blockdraft.targets import load_target
from blockdraft.training.initialization import initialise

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-speculators" / "bin" / "python"
VERIFIERS = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
FORWARD = Path(__file__).with_name("speculators_forward.py")


@pytest.fixture(scope="module")
def pocket(tmp_path_factory):
    target = load_target("pocket")
    return target, export_target(target, tmp_path_factory.mktemp("target") / "pocket")


def new_drafter(kind, target, **changes):
    torch.manual_seed(0)
    options = {"num_layers": 3, "num_proposals": 6, "num_features": 3} | changes
    if kind == "dspark":
        options["markov_rank"] = 16
    drafter = build_drafter(DrafterConfig.for_target(kind, target, **options))
    if drafter.draft_ids is not None:
        drafter.draft_ids = torch.randperm(target.vocab_size)[: len(drafter.draft_ids)].sort().values
    initialise(drafter, std=0.1)
    if kind == "dspark":
        torch.nn.init.normal_(drafter.markov_head.markov_w2.weight, std=0.3)
    return drafter.eval()


@torch.no_grad()
def inputs(drafter, target, text):
    """Return what speculators' forward takes, and our logits ``[A, B, V]`` of the same blocks, or ``[A, B, Vd]``."""
    config = drafter.config
    tokens = torch.tensor([target.render([{"role": "user", "content": text}])])
    seen = {}
    hook = target.model.model.norm.register_forward_pre_hook(lambda _module, args: seen.update(hidden=args[0]))
    features = target.forward(tokens, layers=config.target_layers).features
    hook.remove()
    position = torch.arange(1, tokens.shape[1] - config.num_slots, 2)
    given = {"tokens": tokens, "features": features, "hidden": seen["hidden"], "positions": position}
    path = tokens[0, position[:, None] + torch.arange(config.num_proposals)]
    hidden = drafter(features, path[:, 0], Anchors.of(torch.zeros_like(position), position), target)
    logits = target.logits(hidden)
    logits = logits if drafter.draft_ids is None else logits[..., drafter.draft_ids]
    markov = drafter.markov(hidden, path)
    return given, logits if markov is None else logits + markov[0] @ markov[1].T


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dflash", {}),
        ("dspark", {}),
        ("dspark", {"confidence_head": True}),
        ("dspark", {"slot_layout": "fill_in"}),
        ("dflash", {"draft_vocab_size": 300}),
        ("dspark", {"draft_vocab_size": 300}),
    ],
    ids=["dflash", "dspark", "dspark with confidence", "dspark fill-in", "dflash reduced", "dspark reduced"],
)
def test_its_forward_gives_our_logits(pocket, tmp_path, kind, changes):
    target, verifier = pocket
    drafter = new_drafter(kind, target, **changes)
    export_drafter(drafter, target, tmp_path / "out", "speculators", verifier=str(verifier))
    given, expected = inputs(load_drafter(tmp_path / "out", target), target, "What is a river, and what is a lake?")
    save_file({name: tensor.contiguous() for name, tensor in given.items()}, tmp_path / "inputs")
    command = [PYTHON, FORWARD, tmp_path / "out", tmp_path / "inputs", tmp_path / "outputs"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert all(report[fault] == [] for fault in ("missing", "unexpected", "mismatched", "nan")), report
    assert set(report["not_stored"]) == VERIFIERS - set(frozen_names(drafter.config))
    logits = load_file(tmp_path / "outputs")["logits"]
    if drafter.config.slot_layout is SlotLayout.FILL_IN:
        logits = logits[:, 1:]
    largest = float((logits - expected).abs().max())
    agreement = float((logits.argmax(-1) == expected.argmax(-1)).float().mean())
    print(f"\n{kind} {changes}: {logits.shape[0]} blocks of {logits.shape[1]}, here and in speculators:")
    spread = float(expected.std())
    print(f"  largest difference {largest:.1e}, logits spread over {spread:.2f}, argmax equal {agreement:.0%}")
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_its_logits_our_loss_its_backward(pocket, tmp_path, kind):
    """The guide's code in the package, against our own drafter and objective on the same blocks of two texts."""
    target, verifier = pocket
    drafter = new_drafter(kind, target)
    export_drafter(drafter, target, tmp_path / "out", "speculators", verifier=str(verifier))
    texts = [
        target.render([{"role": "user", "content": each}]) for each in ("What is a river, and what is a lake?", "Why?")
    ]
    lengths = torch.tensor([len(each) for each in texts])
    tokens = torch.tensor([texts[0] + texts[1]])
    documents = torch.arange(2).repeat_interleave(lengths)[None]
    begins = torch.tensor([0, len(texts[0])])[documents]
    mask = ((torch.arange(tokens.shape[1]) - begins) >= 3).float()
    parts = [_passes(target, each, drafter.config.target_layers) for each in texts]
    features, hidden, normed = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    given = {"tokens": tokens, "features": features, "hidden": hidden, "documents": documents, "mask": mask}
    save_file({name: tensor.contiguous() for name, tensor in given.items()}, tmp_path / "inputs")
    page = ROOT / "docs" / "guides" / "bv-in-speculators.md"
    script = Path(__file__).with_name("speculators_bv.py")
    command = [PYTHON, script, tmp_path / "out", tmp_path / "inputs", tmp_path / "outputs", page]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = load_file(tmp_path / "outputs")

    own = load_drafter(tmp_path / "out", target).train()
    num, slots = own.config.num_proposals, own.config.num_slots
    position = torch.arange(tokens.shape[1] - slots)[mask[0, : tokens.shape[1] - slots] > 0]
    at = position[:, None] + torch.arange(num + 1)
    inside = at < tokens.shape[1]
    at = at.clamp(max=tokens.shape[1] - 1)
    path = tokens[0, at]
    valid = inside[:, 1:] & (mask[0, at[:, 1:]] > 0) & (documents[0, at[:, 1:]] == documents[0, at[:, :1]])
    start = begins[0, position]
    out = own(features, path[:, 0], Anchors.of(torch.zeros_like(position), position, start), target)
    value = objective("bv", drafter=kind)(
        own.logits(out, path[:, :-1], target), target.logits(normed[0, at[:, :-1]]), path[:, 1:],
        valid.cumprod(-1).bool(),
    )  # fmt: skip
    value.loss.backward()
    loss = float(value.loss.detach())
    print(f"\n{kind}: BV of {len(position)} blocks, here {loss:.6f}, there {float(theirs['loss']):.6f}")
    torch.testing.assert_close(theirs["loss"][0], value.loss.detach().double(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(theirs["loss_total"][0], value.denominator.detach().double())
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(theirs[name], parameter.grad, atol=1e-5, rtol=1e-3, msg=name)


@torch.no_grad()
def _passes(target, text, layers):
    """Features, and the last hidden states before and after the final norm, of one text alone."""
    seen = {}
    hook = target.model.model.norm.register_forward_pre_hook(lambda _module, args: seen.update(hidden=args[0]))
    out = target.forward(torch.tensor([text]), layers=layers)
    hook.remove()
    return out.features, seen["hidden"], out.hidden
