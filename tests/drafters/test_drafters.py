"""The training forward, three ways and from scratch; who sees what; drafting with a cache."""

import itertools

import pytest
import torch

from blockdraft.decoding import generate
from blockdraft.drafters import Anchors, FlexAttention, GroupedAttention, ReferenceAttention, SlotLayout, build_drafter
from blockdraft.errors import BlockdraftError
from blockdraft.losses import fused_linear_objective, objective

from tiny import tiny_drafter, tiny_target

KINDS = ["dflash", "dspark"]


def reference(anchors, *_):
    return ReferenceAttention(anchors)


def flex(anchors, num_slots, num_rows, length):
    return FlexAttention(anchors, num_slots, num_rows, length)


def grouped(size):
    return lambda anchors, num_slots, _, length: GroupedAttention(anchors, num_slots, length, size)


def scene(kind="dflash", *, packed=False, **changes):
    """A target, a drafter, features of two rows, and blocks at odd places, two of them at the same one."""
    target = tiny_target()
    drafter = tiny_drafter(kind, target, **changes)
    tokens = torch.randint(5, 40, (2, 13), generator=torch.Generator().manual_seed(3))
    features = target.forward(tokens, layers=drafter.config.target_layers).features
    row, position = torch.tensor([1, 0, 1, 1, 0, 1, 1]), torch.tensor([4, 9, 4, 11, 7, 1, 12])
    start = torch.tensor([0, 6, 0, 6, 6, 0, 6]) if packed else None
    return target, drafter, tokens, features, Anchors.of(row, position, start)


def run(drafter, target, tokens, features, anchors, make_attention=None):
    return drafter(features, tokens[anchors.row, anchors.position], anchors, target, make_attention)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_grouped_attention_gives_the_numbers_of_the_reference(size, kind, packed):
    target, drafter, tokens, features, anchors = scene(kind, packed=packed)
    results = []
    for way in (reference, grouped(size)):
        drafter.zero_grad()
        hidden = run(drafter, target, tokens, features, anchors, way)
        (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)).sum().backward()
        gradients = [p.grad.clone() for p in drafter.parameters() if p.grad is not None]
        results.append([hidden.detach(), *gradients])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("calls", [1, 2, 3, 50])
def test_grouped_attention_of_many_blocks_at_chance_places(calls):
    """Texts of several lengths in two rows, some blocks without any context, groups in so many calls."""
    generator = torch.Generator().manual_seed(calls)
    starts = torch.tensor([[0, 7, 11, 30], [0, 20, 21, 33]])
    row, text = (torch.randint(n, (41,), generator=generator) for n in (2, 4))
    ends = torch.cat([starts[:, 1:], torch.full((2, 1), 40)], 1)
    start, end = starts[row, text], ends[row, text]
    position = start + (torch.rand(41, generator=generator) * (end - start)).long()
    anchors = Anchors(row, position, start)
    assert (position == start).any()
    shapes = [(41, 6, 3, 8), (41, 2, 3, 8), (41, 2, 3, 8), (2, 2, 40, 8), (2, 2, 40, 8)]
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]
    weight = torch.randn(shapes[0], dtype=torch.float64, generator=generator)
    results = []
    for attend in (ReferenceAttention(anchors), GroupedAttention(anchors, 3, 40, 4, calls)):
        out = attend(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, weight)])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-7)


def test_grouped_attention_without_blocks_or_without_context():
    empty = torch.zeros(0, dtype=torch.long)
    nothing = [torch.zeros(0, h, 3, 8) for h in (6, 2, 2)]
    context = [torch.randn(1, 2, 5, 8) for _ in range(2)]
    assert GroupedAttention(Anchors.of(empty, empty), 3, 5)(*nothing, *context).shape == (0, 6, 3, 8)
    alone = Anchors.of(torch.tensor([0]), torch.tensor([0]))
    block = [torch.randn(1, h, 3, 8) for h in (6, 2, 2)]
    expected, got = (way(*block, *context) for way in (ReferenceAttention(alone), GroupedAttention(alone, 3, 5)))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grouped_attention_of_half_precision_computes_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    anchors = Anchors.of(torch.tensor([0, 0, 1]), torch.tensor([3, 9, 5]))
    shapes = ((3, 4, 3, 8), (3, 2, 3, 8), (3, 2, 3, 8), (2, 2, 12, 8), (2, 2, 12, 8))
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    attend = GroupedAttention(anchors, 3, 12)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(*tensors)
    assert found.dtype == dtype
    torch.testing.assert_close(found, attend(*(x.float() for x in tensors)).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_gives_the_numbers_of_the_reference(kind, packed):
    """Forward only: PyTorch has no backward of flex attention on a CPU."""
    target, drafter, tokens, features, anchors = scene(kind, packed=packed)
    expected, got = (run(drafter, target, tokens, features, anchors, way) for way in (reference, flex))
    torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-7)


def slow_forward(drafter, target, feature_rows, anchor_token, position):
    """One block from the tensors by name: no code of the package, one slot and one head at a time."""
    w, c = drafter.state_dict(), drafter.config

    def norm(x, name):
        return x / (x.pow(2).mean() + c.rms_norm_eps).sqrt() * w[name]

    def turn(x, at):
        half = c.head_dim // 2
        out = torch.empty_like(x)
        for i in range(half):
            angle = torch.tensor(at / c.rope_theta ** (2 * i / c.head_dim), dtype=x.dtype)
            out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
            out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
        return out

    def split(x):
        return x.view(-1, c.head_dim)

    context = [norm(w["fc.weight"] @ f, "hidden_norm.weight") for f in feature_rows]
    slots = [target.embedding[anchor_token]] + [target.embedding[c.mask_token_id]] * (c.num_slots - 1)
    for i in range(c.num_layers):
        at = f"layers.{i}."
        normed = [norm(x, at + "input_layernorm.weight") for x in slots]
        keys, values = [], []
        for place, x in [*enumerate(context), *enumerate(normed, start=position)]:
            k = split(w[at + "self_attn.k_proj.weight"] @ x)
            keys.append([turn(norm(h, at + "self_attn.k_norm.weight"), place) for h in k])
            values.append(split(w[at + "self_attn.v_proj.weight"] @ x))
        updated = []
        for s, x in enumerate(slots):
            heads = []
            for h, raw in enumerate(split(w[at + "self_attn.q_proj.weight"] @ normed[s])):
                q = turn(norm(raw, at + "self_attn.q_norm.weight"), position + s)
                shared = h // (c.num_heads // c.num_kv_heads)
                scores = torch.stack([q @ k[shared] for k in keys]) / c.head_dim**0.5
                heads.append(sum(p * v[shared] for p, v in zip(scores.softmax(0), values, strict=True)))
            x = x + w[at + "self_attn.o_proj.weight"] @ torch.cat(heads)
            y = norm(x, at + "post_attention_layernorm.weight")
            gate, up = w[at + "mlp.gate_proj.weight"] @ y, w[at + "mlp.up_proj.weight"] @ y
            updated.append(x + w[at + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up))
        slots = updated
    hidden = torch.stack([norm(x, "norm.weight") for x in slots])
    return hidden[1:] if c.slot_layout is SlotLayout.FILL_IN else hidden


@pytest.mark.parametrize("kind", KINDS)
def test_equals_an_independent_slow_implementation(kind):
    target, drafter, tokens, features, anchors = scene(kind)
    fast = run(drafter, target, tokens, features, anchors)
    for a in (0, 1, 5):
        row, position = int(anchors.row[a]), int(anchors.position[a])
        slow = slow_forward(drafter, target, features[row, :position], int(tokens[row, position]), position)
        torch.testing.assert_close(fast[a], slow, atol=1e-5, rtol=0)  # rotary angles are float32, as everywhere


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("make", [grouped(8), flex], ids=["grouped", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_no_block_sees_another_block_its_future_or_its_anchors_feature(make, packed):
    """Change every feature row and every other anchor in turn: only a block's own context may move it."""
    target, drafter, tokens, features, anchors = scene(packed=packed)
    before = run(drafter, target, tokens, features, anchors, make)
    for row, t in itertools.product(range(2), range(13)):
        moved = features.clone()
        moved[row, t] += 1
        after = run(drafter, target, tokens, moved, anchors, make)
        differs = ((after - before).abs() > 1e-9).flatten(1).any(-1)
        sees = (anchors.row == row) & (anchors.start <= t) & (t < anchors.position)
        assert torch.equal(differs, sees), (row, t)
    for a in range(len(anchors)):
        others = tokens[anchors.row, anchors.position].clone()
        others[torch.arange(len(anchors)) != a] = 39
        changed = drafter(features, others, anchors, target, make)
        torch.testing.assert_close(changed[a], before[a], atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_sequence_is_the_sequence_alone(kind):
    target, drafter, tokens, features, _ = scene(kind)
    alone = run(drafter, target, tokens[:1, 6:], features[:1, 6:], Anchors.of(torch.tensor([0]), torch.tensor([3])))
    packed = run(drafter, target, tokens, features, Anchors.of(torch.tensor([0]), torch.tensor([9]), torch.tensor([6])))
    torch.testing.assert_close(packed, alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [(9,), (4, 5), (1, 2, 6)])
def test_drafting_with_a_cache_equals_the_training_forward(kind, pieces):
    """And leaves no trace of the block in the cache."""
    target, drafter, tokens, features, _ = scene(kind)
    cache, done = drafter.new_cache(20), 0
    for n in pieces:
        drafter.extend(cache, features[:1, done : done + n])
        done += n
        drafter.propose(cache, 33, target, 1.0)
        assert cache.length == done
    anchor = int(tokens[0, 9])
    hidden = run(drafter, target, tokens, features, Anchors.of(torch.tensor([0]), torch.tensor([9])))
    proposal = drafter.propose(cache, anchor, target, 0.7, torch.Generator().manual_seed(5))
    logits = target.logits(hidden)
    previous = torch.cat([torch.tensor([[anchor]]), proposal.tokens[:, :-1]], 1)
    markov = drafter.markov(hidden, previous)
    if markov is not None:
        logits = logits + markov[0] @ markov[1].T
    torch.testing.assert_close(proposal.probs, (logits.float() / 0.7).softmax(-1).detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_markov_heads_step_by_step_and_all_at_once(head):
    target = tiny_target()
    drafter = tiny_drafter("dspark", target, markov_head=head)
    hidden = torch.randn(3, 4, 32, dtype=torch.float64)
    previous = torch.randint(40, (3, 4))
    together, w2 = drafter.markov(hidden, previous)
    assert w2.shape == (40, 6)
    state = drafter.markov_head.initial_state(hidden)
    for k in range(4):
        step, state = drafter.markov_head.step(hidden[:, k], previous[:, k], state)
        torch.testing.assert_close(together[:, k], step)
    changed = previous.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 40
    differs = (drafter.markov(hidden, changed)[0] != together).any(-1).any(0)
    assert differs.tolist() == ([True] * 4 if head == "rnn" else [True, False, False, False])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_markov_heads_logits_are_added_in_float32(dtype):
    drafter = tiny_drafter("dspark", tiny_target()).to(dtype)
    logits, embedded = torch.randn(3, 40), torch.randn(3, 6).to(dtype)
    found = drafter.markov_head.add_to(logits, embedded)
    assert found.dtype == torch.float32
    expected = logits + drafter.markov_head.markov_w2(embedded).float()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_a_block_is_drawn_with_one_uniform_number_for_each_position():
    """Each token inverts its own q at its own number, and the numbers are those of a single draw."""
    target, drafter, _, features, _ = scene("dspark")
    cache = drafter.new_cache(20)
    drafter.extend(cache, features[:1, :6])
    proposal = drafter.propose(cache, 8, target, 1.0, torch.Generator().manual_seed(3))
    uniform = torch.rand(4, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    below = proposal.probs[0].double().cumsum(-1)
    assert torch.equal(proposal.tokens[0], (below <= uniform * below[:, -1:]).sum(-1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_proposals", [1, 2, 3, 4])
def test_a_shorter_block_is_that_of_a_drafter_with_fewer_slots(kind, num_proposals):
    """The reference: a drafter of the same weights that has only so many slots, run by the training forward."""
    target, drafter, tokens, features, _ = scene(kind)
    shorter = build_drafter(drafter.config.replace(num_proposals=num_proposals)).double()
    shorter.load_state_dict(drafter.state_dict())
    cache, anchor = drafter.new_cache(20), int(tokens[0, 9])
    drafter.extend(cache, features[:1, :9])
    proposal = drafter.propose(
        cache, anchor, target, 0.7, torch.Generator().manual_seed(5), num_proposals=num_proposals
    )
    assert proposal.tokens.shape == (1, num_proposals)
    hidden = run(shorter, target, tokens, features, Anchors.of(torch.tensor([0]), torch.tensor([9])))
    previous = torch.cat([torch.tensor([[anchor]]), proposal.tokens[:, :-1]], 1)
    expected = (shorter.logits(hidden, previous, target).float() / 0.7).softmax(-1).detach()
    torch.testing.assert_close(proposal.probs, expected, atol=1e-6, rtol=1e-5)
    whole = drafter.propose(cache, anchor, target, 0.7, torch.Generator().manual_seed(5))
    if num_proposals == 4:
        assert torch.equal(proposal.tokens, whole.tokens)
        assert torch.equal(proposal.probs, whole.probs)
    else:  # the slots that are missing were seen by the others
        assert not torch.allclose(proposal.probs[:, 0], whole.probs[:, 0], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_shorter_blocks_decode_the_targets_own_text(kind):
    target = tiny_target()
    drafter = tiny_drafter(kind, target)
    alone = generate(target, None, [7, 8, 9], rule="greedy", max_new_tokens=24)
    out = generate(target, drafter, [7, 8, 9], rule="greedy", num_proposals=2, max_new_tokens=24)
    assert out.tokens == alone.tokens
    assert max(len(each.drafted) for each in out.rounds) == 2


def test_a_drafter_with_fewer_proposals_shares_weights_and_leaves_the_whole_one_alone():
    target, drafter, tokens, features, anchors = scene("dspark")
    fewer = drafter.with_proposals(2)
    assert (fewer.config.num_proposals, drafter.config.num_proposals) == (2, 4)
    assert fewer.fc.weight is drafter.fc.weight
    built = build_drafter(fewer.config).double()
    built.load_state_dict(drafter.state_dict())
    hidden = run(fewer, target, tokens, features, anchors)
    assert hidden.shape[1] == 2
    assert torch.equal(hidden, run(built, target, tokens, features, anchors))
    assert run(drafter, target, tokens, features, anchors).shape[1] == 4


@pytest.mark.parametrize("num_proposals", [0, -1, 5])
def test_no_more_can_be_proposed_than_was_trained(num_proposals):
    target, drafter, *_ = scene()
    with pytest.raises(BlockdraftError, match=f"can propose 4 tokens.* not {num_proposals}"):
        drafter.with_proposals(num_proposals)
    with pytest.raises(BlockdraftError, match=f"can propose 4 tokens.* not {num_proposals}"):
        drafter.propose(drafter.new_cache(20), 8, target, 1.0, num_proposals=num_proposals)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.5, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("num_proposals", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_tokens_are_drawn_from_the_distribution_reported(kind, temperature, num_proposals):
    """Frequencies of the first token, and of the second given the first, against the reported q."""
    target, drafter, _, features, _ = scene(kind)
    cache = drafter.new_cache(20)
    drafter.extend(cache, features[:1, :6])
    generator = torch.Generator().manual_seed(0)
    draws = [
        drafter.propose(cache, 8, target, temperature, generator, num_proposals=num_proposals) for _ in range(1500)
    ]
    first = torch.stack([d.tokens[0, 0] for d in draws])
    expected = draws[0].probs[0, 0] * len(draws)
    observed = torch.bincount(first, minlength=40)
    assert (observed[expected == 0] == 0).all()
    keep = expected > 5
    chi_square = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    assert float(chi_square) < 3 * int(keep.sum()) + 30
    for d in draws[:50]:
        assert (d.probs[0].gather(1, d.tokens.T) > 0).all()
        torch.testing.assert_close(d.probs.sum(-1), torch.ones(1, num_proposals))


def test_layouts_are_explicit_and_give_the_same_number_of_predictions():
    target, drafter, tokens, features, anchors = scene()
    assert drafter.config.slot_layout is SlotLayout.FILL_IN
    assert drafter.config.num_slots == 5
    other = build_drafter(drafter.config.replace(slot_layout=SlotLayout.NEXT_TOKEN)).double()
    other.load_state_dict(drafter.state_dict())
    assert other.config.num_slots == 4
    fill_in, next_token = (run(d, target, tokens, features, anchors) for d in (drafter, other))
    assert fill_in.shape == next_token.shape == (7, 4, 32)
    assert not torch.allclose(fill_in, next_token)


@pytest.mark.parametrize("kind", KINDS)
def test_training_reaches_every_parameter_and_no_weight_of_the_target(kind):
    target, drafter, tokens, features, anchors = scene(kind)
    inside = anchors.position + 4 < 13
    anchors = Anchors(anchors.row[inside], anchors.position[inside], anchors.start[inside])
    at = anchors.position[:, None] + torch.arange(5)
    path = tokens[anchors.row[:, None], at]
    target_hidden = target.forward(tokens).hidden[anchors.row[:, None], at[:, :-1]]
    hidden = run(drafter, target, tokens, features, anchors)
    value = fused_linear_objective(
        objective("bv"), hidden, target_hidden, target.head, target.head, path[:, 1:],
        markov=drafter.markov(hidden, path[:, :-1]),
    )  # fmt: skip
    value.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())
    assert target.head.grad is None
