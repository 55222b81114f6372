"""Whole evaluations of tiny targets, from prompts to results."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from blockdraft.cli.evaluate import show_results
from blockdraft.data import Prompt, read_completions
from blockdraft.decoding import RoundCosts, generate
from blockdraft.evaluation import (
    Evaluation,
    EvaluationError,
    Protocol,
    Task,
    read_profile,
    read_results,
    read_traces,
)
from blockdraft.evaluation.metrics import DecodedPrompt, Records, profile
from blockdraft.evaluation.protocol import DecodingSetup
from blockdraft.evaluation.results import SpeedSettings
from blockdraft.export.card import evaluated
from blockdraft.reports import write_report

from evaluating import (
    FEW,
    LEAST,
    B,
    bigram_target,
    candidate,
    equal_drafter,
    evaluate,
    prompts,
    sharpened_drafter,
    tasks,
)
from tiny import EOS, tiny_drafter, tiny_target


def seed_of(seed, prompt, turn):
    """The seed of one generation, as documented: a hash of the run's seed, the prompt and the turn."""
    digest = hashlib.sha256(f"evaluate/{seed}/{prompt}/{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


CHOICES = (("paper", 1.0), ("best", 1.5), ("one-hot", 0.0))


def test_fewer_proposals_are_evaluated_as_such(tmp_path):
    target = tiny_target(dtype=torch.float32)
    given = candidate("it", tiny_drafter("dflash", target))
    protocol = replace(LEAST, num_proposals=2)
    results = Evaluation(target, [given], tasks(2), protocol, tmp_path).run()
    (about,) = results.drafters
    assert (about.num_proposals, about.trained_proposals, results.settings["num_proposals"]) == (2, 4, 2)
    assert [len(cell.retention) for cell in results.cells] == [2] * len(results.cells)
    for line in (tmp_path / "records" / "0.jsonl").read_text().splitlines():
        assert max(k for turn in json.loads(line)["turns"] for k in turn["accepted"]) <= 2
    assert given.drafter.config.num_proposals == 4
    with pytest.raises(EvaluationError, match="num_proposals differ"):
        Evaluation(target, [given], tasks(2), replace(protocol, num_proposals="auto"), tmp_path).run()


@pytest.mark.slow
def test_the_number_of_proposals_is_chosen_once_from_costs_and_predictions(tmp_path, monkeypatch):
    target = tiny_target(dtype=torch.float32)
    given = [candidate("one", tiny_drafter("dflash", target)), candidate("two", tiny_drafter("dspark", target))]
    protocol = replace(LEAST, num_proposals="auto")
    dear = RoundCosts((0.0,) * 5, (1.0, 1.0, 1.0, 9.0, 9.0), (0.0,) * 5)
    free = RoundCosts((0.0,) * 5, (1.0,) * 5, (0.0,) * 5)
    monkeypatch.setattr(
        "blockdraft.evaluation.evaluation.measure_costs",
        lambda _, drafter, *__, **___: dear if drafter is given[0].drafter else free,
    )
    results = Evaluation(target, given, tasks(2), protocol, tmp_path).run()
    one, two = results.drafters
    assert (one.num_proposals, two.num_proposals) == (2, 4)
    whole = Evaluation(target, given, tasks(2), replace(protocol, num_proposals=None), tmp_path / "whole").run()
    assert one.proposal_choice.lengths == tuple(whole.drafters[0].lengths_by_proposals["block"])
    assert one.proposal_choice.costs == dear
    (two_proposals,) = (
        Evaluation(target, given[:1], tasks(2), replace(protocol, num_proposals=2), tmp_path / "two").run().drafters
    )
    assert one.lengths_by_proposals == two_proposals.lengths_by_proposals  # scored again with two slots
    monkeypatch.setattr("blockdraft.evaluation.evaluation.measure_costs", None)
    assert Evaluation(target, given, tasks(2), protocol, tmp_path).run().averages == results.averages
    monkeypatch.setattr("blockdraft.evaluation.evaluation.measure_costs", lambda *_, **__: dear)
    more = [*given, candidate("three", tiny_drafter("dflash", target, seed=5))]
    chosen = Evaluation(target, more, tasks(2), protocol, tmp_path).run().drafters
    assert [each.num_proposals for each in chosen] == [2, 4, 2]  # a drafter that is added moves no other


@pytest.mark.slow
def test_adaptive_proposals_are_decoded_and_whole_blocks_predicted(tmp_path, monkeypatch):
    target = tiny_target(dtype=torch.float32)
    given = [candidate("it", tiny_drafter("dflash", target))]
    dear = RoundCosts((0.0,) * 5, (1.0, 1.1, 9.0, 9.0, 9.0), (0.0,) * 5)
    monkeypatch.setattr("blockdraft.evaluation.evaluation.measure_costs", lambda *_, **__: dear)
    protocol = replace(LEAST, num_proposals="adaptive")
    results = Evaluation(target, given, tasks(2), protocol, tmp_path / "adaptive").run()
    (about,) = results.drafters
    assert (about.num_proposals, about.proposal_choice.costs) == (4, dear)
    for line in (tmp_path / "adaptive" / "records" / "0.jsonl").read_text().splitlines():
        assert max(k for turn in json.loads(line)["turns"] for k in turn["accepted"]) <= 1
    whole = Evaluation(target, given, tasks(2), LEAST, tmp_path / "whole").run()
    assert about.lengths_by_proposals == whole.drafters[0].lengths_by_proposals
    monkeypatch.setattr("blockdraft.evaluation.evaluation.measure_costs", None)
    assert Evaluation(target, given, tasks(2), protocol, tmp_path / "adaptive").run().averages == results.averages


def test_predictions_use_all_prompts_where_only_some_are_decoded(tmp_path):
    target = tiny_target(dtype=torch.float32)
    given = [candidate("it", tiny_drafter("dflash", target))]
    protocol = LEAST
    whole = Evaluation(target, given, tasks(4), protocol, tmp_path / "whole").run()
    some = Evaluation(target, given, tasks(4), replace(protocol, num_decoded=2), tmp_path / "some").run()
    assert [(each.num_prompts, each.num_decoded) for each in some.tasks] == [(4, 2), (3, 2)]
    assert [each.num_decoded for each in whole.tasks] == [None, None]
    lines = (tmp_path / "some" / "records" / "0.jsonl").read_text().splitlines()
    assert {json.loads(line)["prompt"] for line in lines} == {"one/p0", "one/p2", "two/p0", "two/p1"}
    for ours, theirs in zip(some.cells, whole.cells, strict=True):
        assert ours.predicted_length == theirs.predicted_length
        assert ours.num_generations < theirs.num_generations
        assert ours.acceptance_length.low <= ours.acceptance_length.value <= ours.acceptance_length.high
    with pytest.raises(EvaluationError, match="num_decoded differ"):
        Evaluation(target, given, tasks(4), protocol, tmp_path / "some").run()


def test_lengths_are_predicted_and_nothing_is_decoded_if_no_prompt_is_to_be(tmp_path, capsys):
    target = bigram_target(eos=EOS)
    drafters = {"sure": sharpened_drafter(target), "unsure": sharpened_drafter(target, 0.6)}
    protocol = replace(FEW, num_traces=0)
    whole = evaluate(target, drafters, tmp_path / "whole", protocol, tasks(2))
    only = evaluate(target, drafters, tmp_path / "only", replace(protocol, num_decoded=0), tasks(2))
    assert not (tmp_path / "only" / "records").exists()
    assert {each.decoded_prompts for each in only.tasks} == {0}
    for ours, theirs in zip(only.averages, whole.averages, strict=True):
        assert (ours.choice, ours.predicted_length) == (theirs.choice, theirs.predicted_length)
        assert (ours.acceptance_length, ours.speedup, ours.whole_block_rate) == (None, None, None)
    for ours, theirs in zip(only.cells, whole.cells, strict=True):
        assert (ours.task, ours.predicted_length) == (theirs.task, theirs.predicted_length)
        assert (ours.num_generations, ours.acceptance_length, ours.retention, ours.seconds) == (0, None, [], {})
    assert only.comparisons == [each for each in whole.comparisons if each.quantity == "predicted_length"]
    assert [each.temperatures for each in only.drafters] == [each.temperatures for each in whole.drafters]
    assert read_profile(tmp_path / "only").entries == []
    with pytest.raises(EvaluationError, match="has predicted lengths only"):
        evaluated(tmp_path / "only", drafters["sure"])
    capsys.readouterr()
    show_results(only)
    shown = capsys.readouterr().out
    assert "predicted" in shown
    assert "measured" not in shown
    assert "speed-up" not in shown
    written = write_report([tmp_path / "only"], tmp_path / "report")
    names = {table.name for table in written.tables}
    assert {"gains", "best-temperature", "one-hot", "lengths"} <= names
    assert not {"main", "token-verification", "seconds"} & names
    assert not [name for name in names if name.startswith(("full", "retention"))]
    for table in written.tables:
        heads = {column.heads[-1] for column in table.columns}
        assert not heads & {"τ", "τ measured", "Speed-up", "Drafts only", "Whole blocks"}
    assert {file.stem for file in written.figure_files} == {"temperature-tiny-qwen3"}
    assert [len(headline.findings) for headline in written.headlines] == [1]
    page = written.page.read_text()
    assert "Nothing was decoded: lengths are predicted from the target&#39;s own texts, and none was measured." in page
    assert "Nothing was decoded" not in write_report([tmp_path / "whole"], tmp_path / "report").page.read_text()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An evaluation that several tests look at: its target, drafter, results and folder."""
    folder = tmp_path_factory.mktemp("finished")
    target = tiny_target(dtype=torch.float32)
    drafter = tiny_drafter("dspark", target)
    return target, drafter, evaluate(target, {"a": drafter}, folder), folder


def lines_of(folder):
    return [json.loads(line) for line in (folder / "records" / "0.jsonl").read_text().splitlines()]


def key_of(line):
    return line["prompt"], line["drafter"], line["rule"], line["draft_temperature"]


def cells(results, **wanted):
    return [cell for cell in results.cells if all(getattr(cell, key) == value for key, value in wanted.items())]


def test_a_drafter_equal_to_its_target_keeps_every_block(tmp_path):
    target = bigram_target()
    results = evaluate(target, {"same": equal_drafter(target)}, tmp_path, replace(FEW, max_new_tokens=16), tasks(2))
    for cell in cells(results, choice="paper"):
        assert cell.whole_block_rate == 1.0
        assert cell.draft_length.value == B
        assert cell.acceptance_length.value == B + 1
        assert cell.retention == [1.0] * B
        assert cell.conditional == [1.0] * B
        assert cell.predicted_length.value == pytest.approx(B + 1, rel=1e-4)
    assert results.drafters[0].best_draft_temperature == {"token": 1.0, "block": 1.0}
    assert not cells(results, choice="best")
    assert cells(results, choice="one-hot")


@pytest.mark.slow
def test_a_random_drafter_keeps_almost_nothing(tmp_path):
    target = tiny_target(eos=None, dtype=torch.float32)
    results = evaluate(target, {"random": tiny_drafter("dflash", target)}, tmp_path)
    for each in results.averages:
        assert each.draft_length.value < 0.6
        assert 1 <= each.acceptance_length.value < 1.6
        assert each.whole_block_rate < 0.05


@pytest.mark.slow
def test_predicted_and_measured_lengths_agree(tmp_path):
    target = bigram_target(eos=EOS)
    protocol = Protocol(max_new_tokens=24, num_bootstrap=300, num_traces=0, draft_temperatures=(1.0, 1.5))
    given = [Task("one", "One", "math", "here", prompts(24)), Task("two", "Two", "chat", "here", prompts(10, turns=2))]
    results = evaluate(target, {"sure": sharpened_drafter(target)}, tmp_path, protocol, given)
    assert results.drafters[0].best_draft_temperature == {"token": 1.5, "block": 1.5}  # which undoes the power
    assert {(each.rule, each.choice, each.draft_temperature) for each in results.averages} == {
        ("greedy", "paper", 0.0), *((r, *c) for r in ("token", "block") for c in CHOICES)
    }  # fmt: skip
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
    averages = {(each.rule, each.choice): each for each in results.averages}
    block, token = (averages[rule, "paper"].predicted_length.value for rule in ("block", "token"))
    assert block >= token
    assert averages["block", "one-hot"].predicted_length == averages["token", "one-hot"].predicted_length
    assert averages["block", "one-hot"].predicted_length.value < 0.95 * block  # argmax drafts waste a good drafter


@pytest.mark.slow
def test_one_hot_drafts_are_decoded_under_both_sampled_rules(tmp_path):
    """Both sampled rules are measured with them, unless the protocol says no."""
    target = bigram_target(eos=EOS)
    evaluate(target, {"sure": sharpened_drafter(target)}, tmp_path)
    kept = {}
    for line in lines_of(tmp_path):
        if (line["drafter"], line["draft_temperature"]) == ("sure", 0.0) and line["rule"] != "greedy":
            kept[line["prompt"], line["rule"]] = sum(sum(turn["accepted"]) for turn in line["turns"])
    assert len(kept) == 2 * sum(len(task.prompts) for task in tasks())
    assert sum(kept.values()) > 20
    only = Protocol(rules=("block",), max_new_tokens=8, num_bootstrap=5, num_traces=0, one_hot=False)
    without = evaluate(target, {"sure": sharpened_drafter(target)}, tmp_path / "without", only)
    assert not cells(without, choice="one-hot")


@pytest.mark.slow
def test_drafters_are_compared_on_the_same_prompts(tmp_path):
    target = bigram_target(eos=EOS)
    drafters = {"unsure": sharpened_drafter(target, 0.6), "flash": tiny_drafter("dflash", target)}
    drafters["equal"] = equal_drafter(target)
    short = Protocol(max_new_tokens=16, num_bootstrap=50, num_traces=0, draft_temperatures=(0.6, 1.0))
    results = evaluate(target, drafters, tmp_path, short)
    assert {(each.drafter, each.baseline) for each in results.comparisons} == {("equal", "unsure")}  # by kind
    averages = {(each.drafter, each.rule, each.choice): each for each in results.averages}
    seen = set()
    for each in (each for each in results.comparisons if each.task is None):
        ours, theirs = (
            averages.get((name, each.rule, each.choice)) or averages[name, each.rule, "paper"]
            for name in (each.drafter, each.baseline)
        )
        values = [getattr(average, each.quantity).value for average in (ours, theirs)]
        assert each.ratio.value == pytest.approx(values[0] / values[1])
        assert each.ratio.low <= each.ratio.value <= each.ratio.high
        seen.add((each.rule, each.choice, each.quantity))
    assert ("block", "paper", "predicted_length") in seen
    assert ("block", "best", "acceptance_length") in seen  # the best of "equal" is the paper's temperature
    assert ("token", "one-hot", "speedup") in seen
    assert ("greedy", "best", "speedup") not in seen
    cells = {(each.drafter, each.rule, each.choice, each.task): each for each in results.cells}
    by_task = [each for each in results.comparisons if each.task is not None]
    assert {(each.rule, each.choice, each.quantity, each.task) for each in by_task} == {
        (*place, task) for place in seen if place[2] != "speedup" for task in ("one", "two")
    }
    for each in by_task:
        ours, theirs = (
            getattr(cells.get((name, each.rule, each.choice, each.task)) or cells[name, each.rule, "paper", each.task],
                    each.quantity).value
            for name in (each.drafter, each.baseline)
        )  # fmt: skip
        assert each.ratio.value == pytest.approx(ours / theirs)
        assert each.ratio.low <= each.ratio.value <= each.ratio.high
    gain = next(
        c for c in results.comparisons if (c.rule, c.choice, c.quantity) == ("block", "paper", "predicted_length")
    )
    assert gain.ratio.low > 1
    written = lines_of(tmp_path)
    turned = evaluate(target, drafters, tmp_path, replace(short, baselines=("equal", "flash")))
    assert lines_of(tmp_path) == written  # nothing is decoded again
    assert turned.provenance == results.provenance  # speeds were measured then
    assert {(each.drafter, each.baseline) for each in turned.comparisons} == {("unsure", "equal")}
    back = next(
        c for c in turned.comparisons if (c.rule, c.choice, c.quantity) == (gain.rule, gain.choice, gain.quantity)
    )
    assert back.ratio.value == pytest.approx(1 / gain.ratio.value)
    with pytest.raises(EvaluationError, match="the baseline 'lk' is none of the drafters: unsure, flash"):
        evaluate(target, drafters, tmp_path / "unknown", replace(short, baselines=("lk",)))


def test_the_profile_is_that_of_the_results(finished):
    _, _, results, folder = finished
    found = read_profile(folder)
    assert found == profile(results)
    entry = next(each for each in found.entries if (each.rule, each.choice) == ("block", "paper"))
    counts = np.zeros(B)
    rounds = added = 0
    for line in lines_of(folder):
        if (line["drafter"], line["rule"], line["draft_temperature"]) == ("a", "block", 1.0):
            for turn in line["turns"]:
                rounds += len(turn["accepted"])
                added += sum(turn["added"])
                counts += [sum(kept >= i for kept in turn["accepted"]) for i in range(1, B + 1)]
    assert entry.num_rounds == rounds
    assert entry.micro.marginal == pytest.approx(counts / rounds)
    assert entry.micro.acceptance_length == pytest.approx(added / rounds)


@pytest.mark.slow
def test_an_interrupted_evaluation_goes_on_to_the_same_tokens(tmp_path):
    target = tiny_target(dtype=torch.float32)
    drafters = {"a": tiny_drafter("dflash", target), "b": tiny_drafter("dflash", target, seed=2)}
    short = Protocol(
        rules=("greedy", "block"), max_new_tokens=10, num_bootstrap=20, num_traces=1, draft_temperatures=()
    )
    evaluate(target, drafters, tmp_path / "whole", short)

    class StopError(Exception):
        pass

    for stage, number in (("texts of the target", 3), ("predictions", 2), ("decoding", 5), ("decoding", 24)):

        def stop(at, done, _of, _tokens, stage=stage, number=number):
            if (at, done) == (stage, number):
                raise StopError

        with pytest.raises(StopError):
            evaluate(target, drafters, tmp_path / "parts", short, on_progress=stop)
    with (tmp_path / "parts" / "records" / "0.jsonl").open("ab") as file:
        file.write(b'{"prompt": "one/p3", "dra')  # killed in the middle of a line
    evaluate(target, drafters, tmp_path / "parts", short)

    def kept(folder):
        return {
            key_of(line): [(turn["tokens"], turn["accepted"], turn["added"]) for turn in line["turns"]]
            for line in lines_of(tmp_path / folder)
        }

    assert kept("whole") == kept("parts")
    whole, parts = (read_results(tmp_path / name) for name in ("whole", "parts"))
    for one, other in zip(whole.cells, parts.cells, strict=True):
        assert one.acceptance_length == other.acceptance_length
        assert one.predicted_length == other.predicted_length
    for one, other in zip(whole.comparisons, parts.comparisons, strict=True):
        assert one == other or one.quantity == "speedup"
    assert read_traces(tmp_path / "whole") == read_traces(tmp_path / "parts")


def test_a_folder_holds_one_evaluation(tmp_path):
    target = tiny_target(dtype=torch.float32)
    only_greedy = Protocol(rules=("greedy",), max_new_tokens=8, num_traces=0)
    evaluate(target, {"a": tiny_drafter("dflash", target)}, tmp_path, only_greedy)
    with pytest.raises(EvaluationError, match="drafters differ"):
        evaluate(target, {"a": tiny_drafter("dflash", target, seed=5)}, tmp_path, only_greedy)
    with pytest.raises(EvaluationError, match="rules"):
        evaluate(target, {"a": tiny_drafter("dflash", target)}, tmp_path, FEW)


def test_drafters_may_be_added_to_an_evaluation_and_none_may_leave_it(tmp_path):
    target = tiny_target(dtype=torch.float32)
    protocol = replace(LEAST, num_traces=0)
    drafters = {"a": tiny_drafter("dflash", target), "b": tiny_drafter("dspark", target)}
    first = evaluate(target, {"a": drafters["a"]}, tmp_path / "grown", protocol, tasks(2))
    grown = evaluate(target, drafters, tmp_path / "grown", protocol, tasks(2))
    whole = evaluate(target, drafters, tmp_path / "whole", protocol, tasks(2))

    def lengths(results, *names):
        return [(c.task, c.rule, c.predicted_length, c.acceptance_length) for c in results.cells if c.drafter in names]

    assert lengths(grown, "a", "b") == lengths(whole, "a", "b")
    assert lengths(grown, "a") == lengths(first, "a")
    assert len({key_of(line) for line in lines_of(tmp_path / "grown")}) == len(lines_of(tmp_path / "grown"))
    with pytest.raises(EvaluationError, match="drafters differ"):
        evaluate(target, {"b": drafters["b"]}, tmp_path / "grown", protocol, tasks(2))


@pytest.mark.parametrize("recorded", [True, False])
def test_a_drafter_is_compared_with_what_was_decoded_in_the_same_speed_settings(tmp_path, monkeypatch, recorded):
    """Also where an earlier version began, which recorded none; and what is there is not decoded again."""
    target = tiny_target(dtype=torch.float32)
    protocol = replace(LEAST, num_traces=0)
    drafters = {"a": tiny_drafter("dflash", target)}
    file = tmp_path / "records" / "0.jsonl"
    first = evaluate(target, drafters, tmp_path, protocol, tasks(2))
    if not recorded:
        stripped = [json.dumps({k: v for k, v in line.items() if k != "speed_settings"}) for line in lines_of(tmp_path)]
        file.write_text("".join(f"{line}\n" for line in stripped))
    before, num_threads = file.read_text(), torch.get_num_threads()
    assert evaluate(target, drafters, tmp_path, protocol, tasks(2)).averages == first.averages
    assert file.read_text() == before
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    drafters["b"] = tiny_drafter("dspark", target)
    grown = evaluate(target, drafters, tmp_path, protocol, tasks(2))
    added = [json.loads(line) for line in file.read_text().removeprefix(before).splitlines()]
    assert len(added) == 2 * 3
    assert {(line["drafter"], line["speed_settings"]["threads"]) for line in added} == {(None, 64), ("b", 64)}
    own, other = ({cell.task: cell for cell in cells(grown, drafter=name, choice="paper")} for name in ("a", "b"))
    for cell in cells(first, drafter="a", choice="paper"):
        seconds = sum(
            sum(turn["seconds"].values())
            for line in added
            for turn in line["turns"]
            if line["drafter"] is None and line["prompt"].startswith(f"{cell.task}/")
        )
        assert own[cell.task].speedup == cell.speedup
        assert sum(other[cell.task].baseline_seconds.values()) == pytest.approx(seconds)
    settings = {each.name: [found.threads for found in each.speed_settings] for each in grown.drafters}
    assert settings == {"a": [num_threads] * recorded, "b": [64]}
    after = file.read_text()
    monkeypatch.undo()
    assert evaluate(target, drafters, tmp_path, protocol, tasks(2)).averages == grown.averages
    assert file.read_text() == after  # both have theirs
    written = write_report([tmp_path], tmp_path / "report")
    page = written.page.read_text()
    assert "Drafters of" in page
    assert "were timed in several ways" in page
    (seconds,) = [table for table in written.tables if table.name == "seconds"]
    names = {row.labels[2] for row in seconds.rows if row.labels[2].startswith("Autoregressive")}
    assert names == {"Autoregressive (beside DFlash a)", "Autoregressive (beside DSpark b)"}


def test_an_answer_that_was_left_without_its_baseline_is_decoded_again_in_other_speed_settings():
    def line(drafter, threads):
        settings = SpeedSettings(num_processes=1, threads=threads, device="cpu", dtype="float32", processor="it")
        return DecodedPrompt(
            prompt="p", drafter=drafter, rule="block", draft_temperature=1.0, turns=[], speed_settings=settings
        )

    a, base = DecodingSetup("a", "block", 1.0), DecodingSetup(None, "block", 1.0)
    one, two = line("a", 1).speed_settings, line("a", 2).speed_settings
    stopped = Records([line("a", 1)], LEAST)
    assert stopped.pair("p", a) is None
    assert stopped.missing("p", [base, a], one) == [base]
    assert stopped.missing("p", [base, a], two) == [base, a]
    resumed = Records([line("a", 1), line(None, 2), line("a", 2)], LEAST)
    assert [each.speed_settings for each in resumed.pair("p", a)] == [two, two]
    assert resumed.missing("p", [base, a], one) == []


def test_draft_temperatures_may_be_added_to_an_evaluation_and_none_may_leave_it(tmp_path, capsys):
    target = bigram_target(eos=EOS)
    drafters = {"sure": sharpened_drafter(target, 2.0)}  # best at 2, which undoes the power
    protocol = replace(LEAST, draft_temperatures=(1.0, 1.5))
    first = evaluate(target, drafters, tmp_path, protocol, tasks(2))
    before = lines_of(tmp_path)
    grown = evaluate(target, drafters, tmp_path, replace(protocol, draft_temperatures=(1.0, 1.5, 2.0, 3.0)), tasks(2))
    (narrow,), (wide,) = first.drafters, grown.drafters
    assert (narrow.best_draft_temperature["block"], narrow.edge_of_grid("block")) == (1.5, "highest")
    assert (wide.best_draft_temperature["block"], wide.edge_of_grid("block")) == (2.0, None)
    added = lines_of(tmp_path)[len(before) :]
    assert lines_of(tmp_path)[: len(before)] == before
    assert {key_of(line)[1:] for line in added} == {("sure", "block", 2.0)}  # the new best one, and nothing twice
    with pytest.raises(EvaluationError, match="draft_temperatures differ"):
        evaluate(target, drafters, tmp_path, protocol, tasks(2))
    wider = replace(protocol, draft_temperatures=(1.0, 1.5, 2.0, 3.0))
    argmax = evaluate(target, drafters, tmp_path, replace(wider, one_hot=True), tasks(2))
    assert {each.choice for each in argmax.averages} == {"paper", "best", "one-hot"}
    with pytest.raises(EvaluationError, match="argmax drafts differ"):
        evaluate(target, drafters, tmp_path, wider, tasks(2))
    capsys.readouterr()
    show_results(first)
    assert "sure, block: the best draft temperature, 1.5, is the highest that was tried" in capsys.readouterr().err
    show_results(grown)
    assert capsys.readouterr().err == ""


def test_a_drafter_with_longer_blocks_is_refused_before_anything_is_changed(tmp_path):
    target = tiny_target(dtype=torch.float32)
    protocol = replace(LEAST, num_traces=0)
    short, long = tiny_drafter("dflash", target), tiny_drafter("dflash", target, num_proposals=6)
    first = evaluate(target, {"a": short}, tmp_path, protocol, tasks(2))
    with pytest.raises(EvaluationError, match="b proposes more tokens at a time"):
        evaluate(target, {"a": short, "b": long}, tmp_path, protocol, tasks(2))
    assert evaluate(target, {"a": short}, tmp_path, protocol, tasks(2)).averages == first.averages


@pytest.mark.slow
def test_predictions_of_earlier_weights_are_not_taken_for_those_of_others(tmp_path):
    """Names of drafters mean nothing to predictions: their weights do."""
    target = bigram_target(eos=EOS)
    protocol = Protocol(rules=("block",), max_new_tokens=16, num_bootstrap=5, num_traces=0, draft_temperatures=())
    good, bad = equal_drafter(target), sharpened_drafter(target, 3.0)
    lengths = [
        evaluate(target, {"a": d}, tmp_path / n, protocol, tasks(2)).averages[0].predicted_length
        for d, n in ((good, "good"), (bad, "bad"))
    ]
    assert lengths[0].value > lengths[1].value + 0.5
    both = tmp_path / "both"
    (both / "predictions").mkdir(parents=True)
    for folder in ("good", "bad"):
        for file in (tmp_path / folder / "predictions").iterdir():
            file.rename(both / "predictions" / file.name)
    assert len(list((both / "predictions").iterdir())) == 2
    with pytest.raises(EvaluationError, match="has predictions but no plan"):
        evaluate(target, {"a": bad}, both, protocol, tasks(2))
    (tmp_path / "bad" / "plan.json").rename(both / "plan.json")
    assert evaluate(target, {"a": bad}, both, protocol, tasks(2)).averages[0].predicted_length == lengths[1]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"target": 3}'])
def test_a_damaged_plan_is_named(tmp_path, content):
    target = tiny_target(dtype=torch.float32)
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(EvaluationError, match=r"plan\.json is damaged"):
        evaluate(target, {"a": tiny_drafter("dflash", target)}, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": float("nan")}, "must be above 0 and finite, got nan"),
        ({"temperature": float("inf")}, "must be above 0 and finite, got inf"),
        ({"draft_temperatures": (1.0, 0.0)}, "draft temperatures must be above 0 and finite, got 0"),
        ({"rules": ()}, "at least one verification rule"),
        ({"dynamics_blocks": 0}, "at least one block"),
        ({"num_decoded": -1}, "cannot be negative, got -1"),
    ],
)
def test_protocols_that_mean_nothing(options, message):
    with pytest.raises(EvaluationError, match=message):
        Protocol(**options)


def test_cells_are_what_the_records_say(finished):
    """Pooled over prompts and turns, by a count of its own."""
    target, drafter, results, _ = finished
    for task in tasks():
        rounds, added, new, generations = 0, 0, 0, 0
        for prompt in task.prompts:
            messages = []
            for turn, text in enumerate(prompt.turns):
                messages.append({"role": "user", "content": text})
                seed = seed_of(0, f"{task.name}/{prompt.id}", turn)
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


def test_greedy_answers_are_the_same_with_and_without_a_drafter(finished):
    tokens = {key_of(line): [turn["tokens"] for turn in line["turns"]] for line in lines_of(finished[-1])}
    answered = [prompt for prompt, drafter, rule, _ in tokens if (drafter, rule) == ("a", "greedy")]
    assert len(answered) == 7
    for prompt in answered:
        assert tokens[prompt, "a", "greedy", 0.0] == tokens[prompt, None, "greedy", 0.0]


@pytest.mark.slow
def test_every_turn_that_is_decoded_is_predicted(tmp_path):
    """Also the one after an answer that the budget cut, and none that has no room."""
    target = tiny_target(dtype=torch.float32, eos=None, max_position_embeddings=100)
    target.eos_ids = frozenset()  # the tokenizer has one anyway
    long = [Prompt(f"p{i}", (f"w{i + 5} w6", "w7 w8", "w9 " * 80)) for i in range(3)]
    given = [Task("long", "Long", "chat", "here", long)]
    evaluate(target, {"a": tiny_drafter("dflash", target)}, tmp_path, FEW, given)
    assert {len(line["turns"]) for line in lines_of(tmp_path)} == {2}
    for kind in ("sampled", "greedy"):
        rows = read_completions(tmp_path / "texts" / kind / "000")
        assert sorted(row.id for row in rows) == sorted(f"long/p{i}#{turn}" for i in range(3) for turn in range(2))
        assert {len(row.response_ids) for row in rows} == {24}


def test_prompts_without_room_are_left_out_for_every_way_and_said(tmp_path, capsys):
    target = tiny_target(dtype=torch.float32, max_position_embeddings=64)
    drafters = {"a": tiny_drafter("dflash", target)}
    given = [Task("some", "Some", "math", "here", [*prompts(2), Prompt("long", ("w7 " * 50,))])]
    results = evaluate(target, drafters, tmp_path / "some", FEW, given)
    assert (results.tasks[0].num_prompts, results.tasks[0].num_left_out) == (2, 1)
    assert "some: 1 prompts are left out (1 prompt too long)" in capsys.readouterr().err
    assert {cell.num_generations for cell in results.cells} == {2}
    room = Protocol(max_new_tokens=60, num_traces=0)
    with pytest.raises(EvaluationError, match=r"some: no prompt can be answered with 60 new tokens.*too long"):
        evaluate(target, drafters, tmp_path / "none", room, given)
