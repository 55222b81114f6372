"""Whole evaluations of tiny targets, from prompts to results."""

import hashlib
import json

import numpy as np
import pytest
import torch

from blockdraft.data import Prompt, read_completions
from blockdraft.decoding import generate
from blockdraft.drafters import DrafterConfig, build_drafter, save_drafter
from blockdraft.evaluation import Candidate, Evaluation, EvaluationError, Protocol, Task, read_results, read_traces
from blockdraft.evaluation.about import load_candidates
from blockdraft.evaluation.conversation import DecodingSetup, converse
from blockdraft.evaluation.dynamics import fixed_blocks, training_dynamics
from blockdraft.evaluation.tracing import _texts
from blockdraft.targets import load_target

import runs
from tiny import EOS, tiny_drafter, tiny_target

B = 4
FEW = Protocol(max_new_tokens=24, num_bootstrap=50, num_traces=1, draft_temperatures=(0.6, 1.0))


def seed_of(name):
    """Written out here: records of earlier evaluations rest on it."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def prompts(num, turns=1):
    return [Prompt(f"p{i}", tuple(f"w{5 + (i + t) % 30} w{6 + i % 7}" for t in range(turns))) for i in range(num)]


def tasks(num=4):
    return [
        Task("one", "One", "math", "here", prompts(num)),
        Task("two", "Two", "chat", "here", prompts(num - 1, turns=2)),
    ]


def candidate(name, drafter):
    return Candidate(name, "nowhere", drafter, None, None, None)


def bigram_target(eos=None):
    """A target whose law depends on the last token alone: its layers add nothing."""
    target = tiny_target(eos=eos, dtype=torch.float32)
    with torch.no_grad():
        for layer in target.model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    target.eos_ids = frozenset() if eos is None else frozenset([eos])  # the tokenizer has one anyway
    return target


def same_law(target):
    """A drafter with q = p for a bigram target: all of it in the Markov head."""
    config = DrafterConfig.for_target(
        "dspark", target, num_layers=1, num_proposals=B, num_features=3, markov_rank=target.hidden_size
    )
    drafter = build_drafter(config).to(target.dtype).eval()
    with torch.no_grad():
        drafter.norm.weight.zero_()
        every = torch.arange(target.vocab_size)[:, None]
        drafter.markov_head.markov_w1.weight.copy_(target.forward(every).hidden[:, 0])
        drafter.markov_head.markov_w2.weight.copy_(target.head)
    return drafter


def shifted_law(target, scale=1.5):
    """As `same_law`, too sure of itself: q is p to some power."""
    drafter = same_law(target)
    with torch.no_grad():
        drafter.markov_head.markov_w2.weight.mul_(scale)
    return drafter


def evaluate(target, drafters, out, protocol=FEW, given=None, **options):
    candidates = [candidate(name, drafter) for name, drafter in drafters.items()]
    return Evaluation(target, candidates, given or tasks(), protocol, out, **options).run()


def cells(results, **wanted):
    return [cell for cell in results.cells if all(getattr(cell, key) == value for key, value in wanted.items())]


def test_a_drafter_equal_to_its_target_keeps_every_block(tmp_path):
    target = bigram_target()
    results = evaluate(target, {"same": same_law(target)}, tmp_path)
    for cell in cells(results, choice="paper"):
        assert cell.whole_block_rate == 1.0
        assert cell.draft_length.value == B
        assert cell.acceptance_length.value == B + 1
        assert cell.retention == [1.0] * B
        assert cell.conditional == [1.0] * B
        assert cell.predicted_length.value == pytest.approx(B + 1, rel=1e-4)
    assert results.drafters[0].best_draft_temperature == {"token": 1.0, "block": 1.0}
    assert not cells(results, choice="best")


def test_a_random_drafter_keeps_almost_nothing(tmp_path):
    target = tiny_target(eos=None, dtype=torch.float32)
    results = evaluate(target, {"random": tiny_drafter("dflash", target)}, tmp_path)
    for each in results.averages:
        assert each.draft_length.value < 0.6
        assert 1 <= each.acceptance_length.value < 1.6
        assert each.whole_block_rate < 0.05


def test_predicted_and_measured_lengths_agree(tmp_path):
    target = bigram_target(eos=EOS)
    protocol = Protocol(max_new_tokens=24, num_bootstrap=300, num_traces=0, draft_temperatures=(1.0, 1.5))
    given = [Task("one", "One", "math", "here", prompts(24)), Task("two", "Two", "chat", "here", prompts(10, turns=2))]
    results = evaluate(target, {"sure": shifted_law(target)}, tmp_path, protocol, given)
    assert results.drafters[0].best_draft_temperature == {"token": 1.5, "block": 1.5}  # which undoes the power
    for cell in results.cells:
        if cell.rule == "greedy":
            assert cell.predicted_length.value == pytest.approx(cell.acceptance_length.value)
        elif cell.choice == "best":
            assert cell.whole_block_rate > 0.4
            assert cell.predicted_length.value == pytest.approx(cell.acceptance_length.value, abs=0.35)
        else:
            apart = cell.predicted_length.value - cell.acceptance_length.value
            spread = [(e.high - e.low) / 3.92 for e in (cell.predicted_length, cell.acceptance_length)]
            assert abs(apart) < 4 * np.hypot(*spread)
            assert 1.5 < cell.acceptance_length.value < B + 1
    block, token = (next(a for a in results.averages if (a.rule, a.choice) == (r, "paper")) for r in ("block", "token"))
    assert block.predicted_length.value >= token.predicted_length.value


def test_an_interrupted_evaluation_goes_on_to_the_same_tokens(tmp_path):
    target = tiny_target(dtype=torch.float32)
    drafters = {"a": tiny_drafter("dflash", target), "b": tiny_drafter("dspark", target, seed=2)}
    evaluate(target, drafters, tmp_path / "whole")

    class StopError(Exception):
        pass

    for stage, number in (("target paths", 3), ("predictions", 2), ("decoding", 5), ("decoding", 40)):

        def stop(at, done, _of, _tokens, stage=stage, number=number):
            if (at, done) == (stage, number):
                raise StopError

        with pytest.raises(StopError):
            evaluate(target, drafters, tmp_path / "parts", on_progress=stop)
    with (tmp_path / "parts" / "records" / "0.jsonl").open("ab") as file:
        file.write(b'{"prompt": "one/p3", "wa')  # killed in the middle of a line
    evaluate(target, drafters, tmp_path / "parts")

    def kept(folder):
        lines = map(json.loads, (tmp_path / folder / "records" / "0.jsonl").read_text().splitlines())
        return {
            (line["prompt"], line["way"]): [(t["tokens"], t["accepted"], t["added"]) for t in line["turns"]]
            for line in lines
        }

    assert kept("whole") == kept("parts")
    whole, parts = (read_results(tmp_path / name) for name in ("whole", "parts"))
    for one, other in zip(whole.cells, parts.cells, strict=True):
        assert one.acceptance_length == other.acceptance_length
        assert one.predicted_length == other.predicted_length
    assert read_traces(tmp_path / "whole") == read_traces(tmp_path / "parts")


def test_a_folder_holds_one_evaluation(tmp_path):
    target = tiny_target(dtype=torch.float32)
    only_greedy = Protocol(rules=("greedy",), max_new_tokens=8, num_traces=0)
    evaluate(target, {"a": tiny_drafter("dflash", target)}, tmp_path, only_greedy)
    with pytest.raises(EvaluationError, match="drafters differ"):
        evaluate(target, {"a": tiny_drafter("dflash", target, seed=5)}, tmp_path, only_greedy)
    with pytest.raises(EvaluationError, match="rules"):
        evaluate(target, {"a": tiny_drafter("dflash", target)}, tmp_path, FEW)


def test_cells_are_what_the_records_say(tmp_path):
    """Pooled over prompts and turns, by a count of its own."""
    target = tiny_target(dtype=torch.float32)
    drafter = tiny_drafter("dspark", target)
    results = evaluate(target, {"a": drafter}, tmp_path)
    for task in tasks():
        rounds, added, new, generations = 0, 0, 0, 0
        for prompt in task.prompts:
            messages = []
            for turn, text in enumerate(prompt.turns):
                messages.append({"role": "user", "content": text})
                seed = seed_of(f"evaluate/0/{task.name}/{prompt.id}/{turn}")
                out = generate(target, drafter, messages, rule="block", max_new_tokens=24, seed=seed)
                messages.append({"role": "assistant", "content": out.text})
                rounds += len(out.rounds)
                added += sum(r.accepted + (r.next_token is not None) for r in out.rounds)
                new += len(out.tokens)
                generations += 1
        cell = cells(results, task=task.name, rule="block", choice="paper")[0]
        assert (cell.num_rounds, cell.num_tokens, cell.num_generations) == (rounds, new, generations)
        assert cell.acceptance_length.value == pytest.approx(added / rounds)
        assert sum(cell.retention) == pytest.approx(cell.draft_length.value)
        assert cell.speedup.value == pytest.approx(cell.tokens_per_second / cell.baseline_tokens_per_second)
        assert cell.tokens_per_second == pytest.approx(cell.num_tokens / sum(cell.seconds.values()))
    lengths = [cell.acceptance_length.value for cell in cells(results, rule="block", choice="paper")]
    average = next(a for a in results.averages if (a.rule, a.choice) == ("block", "paper"))
    assert average.acceptance_length.value == pytest.approx(sum(lengths) / 2)


def test_greedy_answers_are_the_same_with_and_without_a_drafter(tmp_path):
    target = tiny_target(dtype=torch.float32)
    evaluate(target, {"a": tiny_drafter("dflash", target)}, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "records" / "0.jsonl").read_text().splitlines()]
    tokens = {(x["prompt"], x["way"]): [t["tokens"] for t in x["turns"]] for x in lines}
    for prompt, way in list(tokens):
        if way == "a/greedy/0":
            assert tokens[prompt, way] == tokens[prompt, "autoregressive/greedy/0"]


def test_traces_tell_the_verdict(tmp_path):
    target = bigram_target(eos=EOS)
    evaluate(target, {"sure": shifted_law(target, 2.0)}, tmp_path)
    traces = read_traces(tmp_path)
    assert [prompt.task for prompt in traces.prompts] == ["one", "two"]
    seen = 0
    for prompt in traces.prompts:
        assert {trace.rule for trace in prompt.traces} == {"token", "block"}
        for trace in prompt.traces:
            tokens, text = [], trace.first_text
            for each in trace.rounds:
                text += "".join(token.text for token in each.drafted[: each.accepted]) + (each.next_text or "")
                tokens += [token.id for token in each.drafted[: each.accepted]]
                tokens += [] if each.next_id is None else [each.next_id]
            assert text.endswith(target.decode(tokens, skip_special_tokens=False))
            for each in trace.rounds:
                successes = [token.coin < token.threshold for token in each.drafted]
                if trace.rule == "block":
                    assert each.accepted == max((i + 1 for i, good in enumerate(successes) if good), default=0)
                    alpha = 1.0
                    for token in each.drafted:
                        alpha = min(1.0, alpha * token.p / token.q)
                        assert token.alpha == pytest.approx(alpha, rel=1e-4)
                else:
                    assert each.accepted == each.token_accepted
                    assert each.accepted == ([*successes, False]).index(False)
                kept = [token.coin < token.token_threshold for token in each.drafted]
                assert each.token_accepted == ([*kept, False]).index(False)
                for token in each.drafted:
                    assert token.token_threshold == pytest.approx(min(1.0, token.p / token.q), rel=1e-4)
                assert (each.next_id is None) == (each.accepted > 0 and each.drafted[each.accepted - 1].id == EOS)
                seen += 1
    assert seen > 10


def test_pieces_of_a_character_wait_for_its_last_one():
    target = load_target("smollm2")
    tokens = target.encode("a 🦙 b")
    assert any("\N{REPLACEMENT CHARACTER}" in target.decode([token]) for token in tokens)
    texts = _texts(target, [], tokens)
    assert "".join(texts) == "a 🦙 b"
    assert "" in texts
    for cut in range(len(tokens)):
        assert "".join(_texts(target, [], tokens[:cut]) + _texts(target, tokens[:cut], tokens[cut:])) == "a 🦙 b"


def test_a_conversation_that_outgrows_the_target_ends_early():
    target = tiny_target(dtype=torch.float32, eos=None)
    long = Prompt("p", ("w5 w6", "w7 " * 20, "w8"))
    way = DecodingSetup(None, "greedy", 0.0)
    answers = converse(target, None, long, way, temperature=1.0, max_new_tokens=24, max_length=64, seed=0)
    assert len(answers) == 1


def test_every_turn_that_is_decoded_is_predicted(tmp_path):
    """Also the one after an answer that the budget cut, and none that has no room."""
    target = tiny_target(dtype=torch.float32, eos=None, max_position_embeddings=100)
    target.eos_ids = frozenset()  # the tokenizer has one anyway
    long = [Prompt(f"p{i}", (f"w{i + 5} w6", "w7 w8", "w9 " * 80)) for i in range(3)]
    given = [Task("long", "Long", "chat", "here", long)]
    evaluate(target, {"a": tiny_drafter("dflash", target)}, tmp_path, FEW, given)
    records = [json.loads(line) for line in (tmp_path / "records" / "0.jsonl").read_text().splitlines()]
    assert {len(line["turns"]) for line in records} == {2}
    for law in ("sampled", "greedy"):
        rows = read_completions(tmp_path / "paths" / law / "000")
        assert sorted(row.id for row in rows) == sorted(f"long/p{i}#{turn}" for i in range(3) for turn in range(2))
        assert {len(row.response_ids) for row in rows} == {24}


def test_prompts_without_room_are_left_out_for_every_way(tmp_path):
    target = tiny_target(dtype=torch.float32, max_position_embeddings=64)
    drafters = {"a": tiny_drafter("dflash", target)}
    given = [Task("some", "Some", "math", "here", [*prompts(2), Prompt("long", ("w7 " * 50,))])]
    results = evaluate(target, drafters, tmp_path / "some", FEW, given)
    assert (results.tasks[0].num_prompts, results.tasks[0].num_left_out) == (2, 1)
    assert {cell.num_generations for cell in results.cells} == {2}
    room = Protocol(max_new_tokens=60, num_traces=0)
    with pytest.raises(EvaluationError, match=r"some: no prompt can be answered with 60 new tokens.*too long"):
        evaluate(target, drafters, tmp_path / "none", room, given)


def test_what_stands_against_dynamics_is_said_and_no_more(tmp_path, capsys):
    data = runs.make_data(tmp_path / "data")
    trainer = runs.train(data, tmp_path / "run", "record.keep_epochs=true")
    next(data.glob("*.parquet")).unlink()
    candidates = load_candidates([str(tmp_path / "run")], trainer.target)
    few = Protocol(rules=("greedy",), max_new_tokens=8, num_bootstrap=5, num_traces=0, dynamics_texts=4)
    results = Evaluation(trainer.target, candidates, tasks(2), few, tmp_path / "out").run()
    assert results.dynamics == []
    assert read_results(tmp_path / "out") == results
    assert "no training dynamics of run: " in capsys.readouterr().err


def test_dynamics_of_a_run_that_kept_its_epochs(tmp_path):
    data = runs.make_data(tmp_path / "data")
    trainer = runs.train(data, tmp_path / "run", "record.keep_epochs=true")
    target = trainer.target
    found = load_candidates([str(tmp_path / "run")], target)[0]
    assert (found.name, found.label, found.objective) == ("run", "BV", "bv")
    dynamics = training_dynamics("run", found.folder, found.run, target, num_texts=9, blocks_per_text=3, seed=1)
    again = training_dynamics("run", found.folder, found.run, target, num_texts=9, blocks_per_text=3, seed=1)
    assert dynamics == again
    assert [point.epoch for point in dynamics.points] == [1.0, 2.0]
    assert dynamics.num_texts == 9
    assert dynamics.num_blocks <= 27
    assert all(0 <= point.accuracy <= 1 and 0 <= point.draft_length <= B for point in dynamics.points)


def test_dynamics_of_a_drafter_equal_to_its_target(tmp_path):
    """One draw per block keeps all of it; accuracy is that of the likeliest token."""
    from blockdraft.data import open_dataset
    from blockdraft.evaluation.dynamics import measure

    target = bigram_target()
    paths = open_dataset(runs.make_data(tmp_path / "data", target), target)
    chosen = fixed_blocks(paths, 8, 3, B, seed=0)
    accuracy, length = measure(target, same_law(target), paths, chosen, seed=0)
    assert length == B
    hits = total = 0
    for each in chosen:
        text = torch.tensor(paths[each.text].astype(np.int64))
        best = target.logits(target.forward(text[None]).hidden)[0].argmax(-1)
        for anchor in each.anchors.tolist():
            hits += int((best[anchor : anchor + B] == text[anchor + 1 : anchor + 1 + B]).sum())
            total += B
    assert accuracy == pytest.approx(hits / total)


def test_names_and_labels(tmp_path):
    target = tiny_target(dtype=torch.float32)
    save_drafter(tiny_drafter("dflash", target), tmp_path / "mine")
    found = load_candidates([str(tmp_path / "mine"), f"other={tmp_path / 'mine'}"], target)
    assert [(each.name, each.label, each.step) for each in found] == [("mine", "mine", None), ("other", "other", None)]
    with pytest.raises(EvaluationError, match="two drafters are called 'mine'"):
        load_candidates([str(tmp_path / "mine")] * 2, target)
    with pytest.raises(EvaluationError, match="'autoregressive' is what decoding without a drafter is called"):
        load_candidates([f"autoregressive={tmp_path / 'mine'}"], target)
    save_drafter(tiny_drafter("dflash", target), tmp_path / "rate=1e-3")
    assert load_candidates([str(tmp_path / "rate=1e-3")], target)[0].name == "rate=1e-3"
    half = tiny_target(dtype=torch.bfloat16)
    assert load_candidates([str(tmp_path / "mine")], half)[0].drafter.fc.weight.dtype == torch.bfloat16
    run = {
        "recipe": {"objective": {"name": "bv", "options": {}}, "annealing": {"share": 0.0, "initial": 0, "final": 1}}
    }
    assert Candidate("x", tmp_path, found[0].drafter, run, tmp_path, 1).label == "BV w/o annealing"
    run["recipe"]["objective"]["options"]["form"] = "linear"
    assert Candidate("x", tmp_path, found[0].drafter, run, tmp_path, 1).label == "BV linear"
