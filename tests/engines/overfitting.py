"""A small drafter that knows a handful of texts by heart: enough for an engine to accept its blocks."""

import torch
from torch.nn.functional import cross_entropy

from blockdraft.decoding import generate
from blockdraft.drafters import Anchors, DrafterConfig, build_drafter
from blockdraft.training.initialization import initialise

NUM_OTHERS = 2048


def overfit_drafter(target, prompts, *, num_tokens, num_steps, num_blocks=48, rate=2e-3, temperature=0.0, **shape):
    """A DFlash drafter trained with CE on blocks of the target's own answers to these prompts (token ids).

    With a ``draft_vocab_size`` it can propose the tokens of these answers, and others by chance, up to that number.
    """
    rule = "block" if temperature > 0 else "greedy"
    answers = [
        generate(target, None, ids, rule=rule, temperature=temperature, max_new_tokens=num_tokens, seed=i).tokens
        for i, ids in enumerate(prompts)
    ]
    torch.manual_seed(0)
    drafter = build_drafter(DrafterConfig.for_target("dflash", target, **shape))
    initialise(drafter)
    if drafter.draft_ids is not None:
        known = torch.tensor([token for answer in answers for token in answer]).unique()
        missing = torch.ones(target.vocab_size, dtype=torch.bool)
        missing[known] = False
        others = missing.nonzero()[:, 0]
        others = others[torch.randperm(len(others))[: len(drafter.draft_ids) - len(known)]]
        drafter.draft_ids = torch.cat([known, others]).sort().values
    config, num = drafter.config, drafter.config.num_proposals
    texts = [ids + answer for ids, answer in zip(prompts, answers, strict=True)]
    tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    output = target.forward(tokens, layers=config.target_layers)  # causal: what is behind a text does not matter
    places = torch.tensor(
        [
            (row, at)
            for row, (ids, text) in enumerate(zip(prompts, texts, strict=True))
            for at in range(len(ids), len(text) - num)
        ]
    )
    optimizer = torch.optim.AdamW(drafter.train().parameters(), lr=rate)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 10) * (1 - step / num_steps)
        row, position = places[torch.randperm(len(places))[:num_blocks]].T
        at = position[:, None] + torch.arange(num + 1)
        path = tokens[row[:, None], at]
        hidden = drafter(output.features, path[:, 0], Anchors.of(row, position), target)
        some = drafter.draft_ids
        if some is None:
            others = torch.randint(target.vocab_size, (NUM_OTHERS,))
            some = torch.cat([path[:, 1:].flatten(), others]).unique()  # cheaper than the whole vocabulary, and enough
        loss = cross_entropy(
            (hidden @ target.head[some].T).flatten(0, 1), torch.searchsorted(some, path[:, 1:].flatten())
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()
