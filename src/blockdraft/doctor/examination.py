"""Examine a drafter's folder, from its configuration to the readings that fit its weights."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from blockdraft.data import Completion, DataError, check_sampling, open_dataset, read_manifest
from blockdraft.data.conversation import tokens_at
from blockdraft.decoding import DecodingError, room
from blockdraft.doctor.configuration import check_configuration
from blockdraft.doctor.folder import Diagnosis, Finding, Folder
from blockdraft.doctor.readings import Clinic, Reading, choices_for, fitting, pooled, reading_findings
from blockdraft.doctor.tensors import check_frozen, check_stored_tensors
from blockdraft.drafters import find_drafter
from blockdraft.errors import BlockdraftError
from blockdraft.pocket import FAMILIES, heldout
from blockdraft.targets import BatchedKVCache, Sampling, Target, template_fingerprint

PROMPTS = (
    "What is a river?",
    "Write a short story about a lighthouse keeper.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 60 kilometres in 45 minutes. How fast is it?",
    "Explain how a bicycle stays upright.",
    "Give me three tips for better sleep.",
    "Translate into French: The weather is nice today.",
    "List the planets of the solar system and one fact about each.",
)
"""What the target is asked where no data folder is given."""
CHECKED_TOKENS = 4_000
"""Response tokens of a data folder whose distribution is checked."""
UNLIKE = 1.1
"""Ratio of the lengths with and without thinking from which on a drafter was trained for one of the two."""


def examine(
    drafter: str | Path,
    target: Target,
    *,
    data: str | Path | None = None,
    prompts: Sequence[str] | None = None,
    num_texts: int = 8,
    max_new_tokens: int = 64,
    seed: int = 0,
    measure: bool = True,
) -> Diagnosis:
    """Examine a drafter for a target, and say in words what is wrong with its folder.

    Args:
        drafter: a folder in our format, or in one of z-lab, DeepSpec or the package speculators; a run's folder; or
            the id of a repository on the Hugging Face Hub.
        target: the model that it should draft for.
        data: a data folder of the target, checked as well and measured on; texts are sampled on the spot without it.
        prompts: what the target is asked where there is no data folder; a few questions of everyday chat, mathematics
            and code if not given, and pocket's own held-out prompts for pocket, which knows little else.
        num_texts, max_new_tokens: how many texts to measure on, and how much of each.
        seed: of the texts.
        measure: also measure predicted tokens per call under the plausible readings.
    """
    prompts = prompts or questions(target, num_texts)
    folder = Folder(find_drafter(drafter))
    found = Diagnosis(str(drafter), target.name, folder.format)
    found.findings += check_configuration(folder, target)
    own: Target | None = None
    if folder.hopeless is None:
        try:
            config = folder.config(target.num_layers)
        except BlockdraftError as error:
            folder.hopeless = "the configuration cannot be read"
            found.findings.append(Finding("configuration", "wrong", str(error), "correct it and examine it again"))
    if folder.hopeless is None:
        found.findings += check_stored_tensors(folder, config)
        findings, own = check_frozen(folder, config, target)
        found.findings += findings
    sizes = {"num_texts": num_texts, "max_new_tokens": max_new_tokens, "num_slots": folder.num_slots or 1}
    texts = None if data is None else _data_texts(found, data, target, **sizes, seed=seed)
    if folder.hopeless is not None:
        found.findings.append(Finding("drafting", "warning", f"not measured: {folder.hopeless}"))
    elif measure:
        if texts is None:
            ids = [_prompt(target, prompts[i % len(prompts)]) for i in range(num_texts)]
            _check_room(target, ids, max_new_tokens, config.num_slots)
            texts = sample_texts(target, ids, max_new_tokens + config.num_slots, seed)
            found.texts = f"{len(texts)} texts sampled from {target.name} at temperature 1"
        else:
            found.texts = f"{len(texts)} texts of {data}"
        given = Reading(config, causal=_says_causal(folder), own_head=own is not None)
        clinic = Clinic(target, folder.tensors, own, texts, max_new_tokens=max_new_tokens)
        choices = choices_for(given, target, says_causal=given.causal, own=own is not None)
        best, found.measured = clinic.best(given, choices)
        found.findings += reading_findings(folder, found.measured, drafts=clinic.reads_the_text(best))
        found.findings.append(fitting(clinic, given, best))
        found.findings.append(_thinking(clinic, best, prompts, num_texts, max_new_tokens, seed))
    return found


def questions(target: Target, num: int) -> Sequence[str]:
    """Return what to ask a target, ``num`` or fewer prompts."""
    if target.name != "pocket":
        return PROMPTS
    each = -(-num // len(FAMILIES))
    asked = zip(*(heldout(family, each) for family in FAMILIES), strict=True)  # one of each family in turn
    return [example.prompt for examples in asked for example in examples][:num]


def _says_causal(folder: Folder) -> bool:
    nested = folder.given.get("dflash_config")
    flags = [folder.given.get("is_causal"), nested.get("causal") if isinstance(nested, dict) else None]
    return any(flag is True for flag in flags)


# Texts


@torch.inference_mode()
def sample_texts(target: Target, prompts: Sequence[Sequence[int]], num_tokens: int, seed: int) -> list[Completion]:
    """Sample a response to each prompt at temperature 1, all of them side by side, each cut at its end token."""
    cache = BatchedKVCache(target, len(prompts), max(map(len, prompts)) + num_tokens)
    generator = torch.Generator().manual_seed(seed)
    hidden, columns = cache.add(prompts), []
    for _ in range(num_tokens):
        uniform = torch.rand(len(prompts), dtype=torch.float64, generator=generator)
        columns.append(tokens_at(Sampling().probs(target.logits(hidden)), uniform.to(target.device)).tolist())
        hidden = cache.step(columns[-1])
    texts = []
    for number, (prompt, response) in enumerate(zip(prompts, zip(*columns, strict=True), strict=True)):
        end = next((i for i, token in enumerate(response) if token in target.eos_ids), None)
        kept = list(response if end is None else response[: end + 1])
        texts.append(Completion(f"{number}#0", list(prompt), kept, "length" if end is None else "stop"))
    return texts


def _check_room(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, num_slots: int) -> None:
    """Refuse texts that the target's context cannot hold, as decoding does."""
    fits = room(target, None, max(map(len, prompts)))
    if fits is not None and max_new_tokens + num_slots > fits:
        raise DecodingError(
            f"{target.name} reads at most {target.context_length:,} tokens, and texts of {max_new_tokens:,} new ones "
            f"with a block behind them are longer; set --max-new-tokens to at most {fits - num_slots:,}"
        )


def _prompt(target: Target, prompt: str, *, thinking: bool = False) -> list[int]:
    """Return the ids of a user's message under the chat template, or as it stands where there is none."""
    if target.tokenizer is None:
        ids = np.random.default_rng(len(prompt)).integers(target.vocab_size, size=4).tolist()
        return [int(each) for each in ids]
    if not target.tokenizer.chat_template:
        return target.encode(prompt)
    if not thinking:
        return target.render([{"role": "user", "content": prompt}])
    messages = [{"role": "user", "content": prompt}]
    text = target.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    return target.encode(str(text))


def _data_texts(
    found: Diagnosis,
    data: str | Path,
    target: Target,
    *,
    num_texts: int,
    max_new_tokens: int,
    num_slots: int,
    seed: int,
) -> list[Completion] | None:
    """Check a data folder, and return some of its texts; None if there are none that can be measured on."""
    manifest = read_manifest(data)
    try:
        dataset = open_dataset(data, target, partial=True)
        if len(dataset) == 0:
            raise DataError(f"{data} holds no texts yet")
    except DataError as error:
        advice = "regenerate the data with this target: blockdraft data regenerate"
        found.findings.append(Finding("data", "wrong", str(error), advice))
        return None
    sampled = check_sampling(dataset, target, num_tokens=CHECKED_TOKENS, seed=seed)
    advice = "" if sampled.plain else "regenerate it at temperature 1 with top-k 0 and top-p 1; BV loss rests on that"
    found.findings.append(Finding("data", "ok" if sampled.plain else "wrong", sampled.verdict, advice))
    if manifest.identity.template != template_fingerprint(target):
        found.findings.append(Finding("data", "wrong", "made under another chat template", "regenerate it"))
    if not sampled.plain:
        return None
    texts = []
    for index in np.random.default_rng(seed).permutation(len(dataset)).tolist():
        ids, cut = dataset[index].tolist(), int(dataset.prompt_lengths[index])
        response = ids[cut : cut + max_new_tokens + num_slots]
        stopped = response[-1] in target.eos_ids
        if len(response) > (1 if stopped else num_slots + 1):
            texts.append(Completion(f"{index}#0", ids[:cut], response, "stop" if stopped else "length"))
        if len(texts) == num_texts:
            break
    return texts or None


def _thinking(
    clinic: Clinic, best: Reading, prompts: Sequence[str], num_texts: int, max_new_tokens: int, seed: int
) -> Finding:
    """Measure the drafter on texts with and without thinking, where the target's template tells them apart."""
    target = clinic.target
    asked = [prompts[i % len(prompts)] for i in range(num_texts)]
    ids = [[_prompt(target, each, thinking=thinking) for each in asked] for thinking in (False, True)]
    if ids[0] == ids[1]:
        return Finding("thinking", "ok", "the target's chat template does not know thinking")
    for each in ids:
        _check_room(target, each, max_new_tokens, best.config.num_slots)
    texts = [sample_texts(target, each, max_new_tokens + best.config.num_slots, seed) for each in ids]
    without, with_thinking = (pooled(clinic.predict(best, each)) for each in texts)
    found = f"{without:.2f} tokens per call without thinking, {with_thinking:.2f} with it"
    if with_thinking > UNLIKE * without:
        advice = "it was trained with thinking on: serve it so, or train it further on texts without thinking"
        return Finding("thinking", "warning", found, advice)
    if without > UNLIKE * with_thinking:
        advice = "it was trained with thinking off: send enable_thinking=false with every request, or expect less"
        return Finding("thinking", "warning", found, advice)
    return Finding("thinking", "ok", found)
