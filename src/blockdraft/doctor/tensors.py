"""Check the tensors of a folder: names, shapes, numbers, and whose head and embedding they are."""

import copy
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from blockdraft.doctor.folder import Finding, Folder, listed
from blockdraft.drafters import DrafterConfig, build_drafter
from blockdraft.drafters.checkpoint import CONFIG, DRAFT_IDS, WEIGHTS
from blockdraft.drafters.formats import D2T, EMBEDDING, HEAD, T2D, frozen_names
from blockdraft.targets import DTYPES, Target

RELATED = 0.5
"""Mean cosine between rows of two matrices above which one was made from the other; unrelated ones have about 0."""


def check_stored_tensors(folder: Folder, config: DrafterConfig) -> Iterator[Finding]:
    """Run all checks of the weights, and mend what can be mended."""
    yield from _prefix(folder)
    yield from _dtype(folder)
    yield from _numbers(folder)
    yield from _vocabulary(folder, config)
    yield from _names(folder, config)


def _prefix(folder: Folder) -> Iterator[Finding]:
    """Strip one more word before every name, of a drafter that was saved as a part of something else."""
    if "fc.weight" in folder.tensors:
        return
    prefix = next((n.removesuffix("fc.weight") for n in folder.tensors if n.endswith(".fc.weight")), None)
    if prefix is None:
        return
    yield Finding(
        "tensors",
        "wrong",
        f"names begin with {prefix!r}: engines find none of them, and some go on with random weights",
        f"rename them in {WEIGHTS}: {prefix}fc.weight is fc.weight, and so on",
    )
    folder.tensors = {name.removeprefix(prefix): tensor for name, tensor in folder.tensors.items()}


def _dtype(folder: Folder) -> Iterator[Finding]:
    found = Counter(str(t.dtype).removeprefix("torch.") for t in folder.tensors.values() if t.is_floating_point())
    strange = [name for name in found if name not in DTYPES]
    stated = folder.given.get("dtype") or folder.given.get("torch_dtype")
    whole = [n for n, t in folder.tensors.items() if not t.is_floating_point() and n not in (D2T, T2D, DRAFT_IDS)]
    if whole:
        folder.hopeless = "weights are whole numbers, which nothing can be drafted with"
        kind = str(folder.tensors[whole[0]].dtype).removeprefix("torch.")
        yield Finding("dtype", "wrong", f"{listed(whole)}: {kind}", f"convert to one of {', '.join(DTYPES)}")
    elif strange:
        folder.hopeless = f"weights of {strange[0]} cannot be drafted with"
        yield Finding("dtype", "wrong", f"weights of {listed(strange)}", f"convert them to one of {', '.join(DTYPES)}")
    elif len(found) > 1:
        counts = ", ".join(f"{num} of {name}" for name, num in found.most_common())
        yield Finding("dtype", "warning", f"tensors of several dtypes: {counts}", "write all of them in one")
    elif found and folder.format != "blockdraft" and stated not in list(found):
        own = next(iter(found))
        said = "does not say so" if stated is None else f"says {stated}"
        yield Finding("dtype", "warning", f"weights of {own}; {CONFIG} {said}", f'write "dtype": "{own}" in {CONFIG}')
    elif found:
        yield Finding("dtype", "ok", next(iter(found)))


def _numbers(folder: Folder) -> Iterator[Finding]:
    floats = {name: tensor for name, tensor in folder.tensors.items() if tensor.is_floating_point()}
    broken = [name for name, tensor in floats.items() if not bool(tensor.isfinite().all())]
    zero = [name for name, tensor in floats.items() if name not in broken and not bool(tensor.any())]
    if broken:
        folder.hopeless = "weights are NaN or infinite"
        advice = "take an earlier checkpoint; training or a conversion went wrong, float16 overflow among the causes"
        yield Finding("numbers", "wrong", f"NaN or infinity in {listed(broken)}", advice)
    if zero:
        head = "markov_head.markov_w2.weight" in zero
        what = "the Markov head has no effect; it was never trained" if head else "these tensors were never trained"
        yield Finding("numbers", "warning", f"all zero: {listed(zero)}", what)
    if not broken and not zero:
        yield Finding("numbers", "ok", f"{len(floats)} tensors, all finite")


def _vocabulary(folder: Folder, config: DrafterConfig) -> Iterator[Finding]:
    """Check the maps of a reduced draft vocabulary: offsets to token ids, and a mark on the tokens that are in it."""
    offsets, known, size = folder.tensors.get(D2T), folder.tensors.get(T2D), config.draft_vocab_size
    if folder.format == "blockdraft":
        return
    if size is None:
        if offsets is not None or known is not None:
            found = f"{D2T} and {T2D} are there, and draft_vocab_size is the whole vocabulary"
            yield Finding("draft vocabulary", "warning", found, f"remove them from {WEIGHTS}")
            folder.tensors.pop(D2T, None)
            folder.tensors.pop(T2D, None)
        return
    good = offsets is not None and offsets.shape == (size,) and not offsets.is_floating_point()
    if not good:
        state = "missing" if offsets is None else f"{offsets.dtype} of shape {list(offsets.shape)}"
        yield Finding("draft vocabulary", "wrong", f"{D2T} is {state}", f"write {size} int64 offsets into {WEIGHTS}")
        folder.hopeless = "it is not known which tokens the drafter's head stands for"
        return
    assert offsets is not None
    ids, marked = torch.arange(size) + offsets.long(), None
    if known is not None and known.numel() == config.vocab_size:
        marked = known.bool().nonzero().flatten()
    as_ids = offsets.long()
    outside = int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size
    if not _distinct(ids, config.vocab_size) or (marked is not None and not torch.equal(ids.sort().values, marked)):
        problem = "leads outside of the vocabulary" if outside else f"does not lead to the tokens that {T2D} marks"
        if _distinct(as_ids, config.vocab_size) and (marked is None or torch.equal(as_ids.sort().values, marked)):
            advice = f"it holds token ids; engines add the index to it: write ids - arange({size}) into {WEIGHTS}"
            ids = as_ids
        elif marked is not None and len(marked) == size:
            advice = f"write {D2T} from {T2D}: its marked ids - arange({size})"
            ids = marked
        else:
            advice = f"write {D2T} and {T2D} again from the list of tokens that it was trained with"
            if not _distinct(ids, config.vocab_size):
                folder.hopeless = "it is not known which tokens the drafter's head stands for"
        yield Finding("draft vocabulary", "wrong", f"{D2T} {problem}", advice)
    elif marked is None:
        yield Finding(
            "draft vocabulary", "warning", f"{T2D} is missing or of another size", "write it: engines read it"
        )
    else:
        yield Finding("draft vocabulary", "ok", f"{size:,} of {config.vocab_size:,} tokens; {D2T} and {T2D} agree")
    folder.tensors.pop(T2D, None)
    del folder.tensors[D2T]
    _sort(folder, ids, size)


def _distinct(ids: Tensor, vocab_size: int) -> bool:
    return len(ids.unique()) == len(ids) and int(ids.min()) >= 0 and int(ids.max()) < vocab_size


def _sort(folder: Folder, ids: Tensor, size: int) -> None:
    """Put the draft vocabulary into ascending order, as our drafters have it, with the rows that stand for it."""
    folder.tensors[DRAFT_IDS], order = ids.sort()
    for name in (HEAD, "markov_head.markov_w2.weight"):
        rows = folder.tensors.get(name)
        if rows is not None and len(rows) == size:
            folder.tensors[name] = rows[order]


def _names(folder: Folder, config: DrafterConfig) -> Iterator[Finding]:
    with torch.device("meta"):
        wanted = build_drafter(config).state_dict()
    copies = () if folder.format == "blockdraft" else (EMBEDDING, HEAD)
    found = {name: tensor for name, tensor in folder.tensors.items() if name not in copies}
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    shapes = [n for n in wanted if n in found and found[n].shape != wanted[n].shape]
    if missing:
        folder.hopeless = "tensors are missing"
        advice = "engines leave them random without a word; write the folder again, with all of them"
        yield Finding("tensors", "wrong", f"missing {listed(missing)}", advice)
    if shapes:
        folder.hopeless = "tensors have other shapes than the configuration asks for"
        each = [f"{n} is {list(found[n].shape)}, not {list(wanted[n].shape)}" for n in shapes]
        yield Finding("tensors", "wrong", listed(each, 2), f"{CONFIG} describes another drafter than {WEIGHTS} holds")
    if extra:
        advice = "SGLang ignores them without a word, others refuse them; is the drafter of another kind?"
        yield Finding("tensors", "warning", f"unexpected {listed(extra)}", advice)
        for name in extra:
            del folder.tensors[name]
    if not (missing or shapes or extra):
        yield Finding("tensors", "ok", f"{len(wanted)} names and shapes, as they must be")


def check_frozen(folder: Folder, config: DrafterConfig, target: Target) -> tuple[list[Finding], Target | None]:
    """Compare the folder's head and embedding with the target's, and take them out of its tensors.

    Returns:
        the findings, and the target with the folder's own head and embedding in place of its, if they are others.
    """
    findings, own = [], copy.copy(target)
    needed = frozen_names(config) if folder.format != "blockdraft" else ()
    ids = folder.tensors.get(DRAFT_IDS)
    for name, what in ((EMBEDDING, "embedding"), (HEAD, "head")):
        whole = getattr(target, what)
        theirs = whole if ids is None or what == "embedding" else whole[ids.to(target.device)]
        stored = folder.tensors.pop(name, None)
        if folder.format == "blockdraft":
            continue
        if stored is None:
            if name in needed:
                advice = "engines leave it random or NaN; copy the target's into the folder, as blockdraft export does"
                findings.append(Finding("head and embedding", "wrong", f"{name} is missing", advice))
            continue
        if stored.shape != theirs.shape:
            found = f"{name} is {list(stored.shape)}; the target's is {list(theirs.shape)}"
            findings.append(Finding("head and embedding", "wrong", found, "copy the target's into the folder"))
            continue
        state, cosine = _relation(stored, theirs)
        if state == "copy":
            findings.append(Finding("head and embedding", "ok", f"{name} is a copy of the target's"))
            continue
        if state == "random":
            found = f"{name} has nothing to do with the target's (mean cosine of rows {cosine:.2f}): left random?"
            advice = f"copy the target's into {WEIGHTS}, unless the measured readings say that it fits"
        else:
            found = f"{name} is not a copy of the target's, but close to it (mean cosine of rows {cosine:.2f})"
            advice = "blockdraft uses the target's and refuses others; copy it, or see the measured readings"
        findings.append(Finding("head and embedding", "wrong", found, advice))
        replaced = stored.to(target.device, whole.dtype)
        if ids is not None and what == "head":
            replaced = whole.clone().index_copy_(0, ids.to(target.device), replaced)
        setattr(own, what, replaced)
    if not findings:
        findings.append(Finding("head and embedding", "ok", "none of its own: the target's are used"))
    changed = own.head is not target.head or own.embedding is not target.embedding
    return findings, own if changed else None


def _relation(stored: Tensor, own: Tensor) -> tuple[str, float]:
    """Return whether a matrix is a copy of the target's, related to it, or random, and the mean cosine of rows."""
    own = own.detach().cpu()
    coarser = min(stored.dtype, own.dtype, key=lambda dtype: dtype.itemsize)
    if torch.equal(stored.to(coarser), own.to(coarser)):
        return "copy", 1.0
    step = max(1, len(stored) // 4096)
    cosine = float(cosine_similarity(stored[::step].float(), own[::step].float(), dim=-1).mean())
    return ("related" if cosine > RELATED else "random"), cosine
