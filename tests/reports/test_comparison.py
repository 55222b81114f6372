"""Several evaluations as one: order, names that differ, what cannot be read."""

import json

import pytest

from blockdraft.evaluation import EvaluationError
from blockdraft.reports import read_evaluations
from blockdraft.reports.notes import differences, undecoded

import synthetic


def test_order_is_the_papers(tmp_path):
    folder = synthetic.write(tmp_path / "a", synthetic.results())
    found = read_evaluations([folder])
    assert found.targets == ("pocket",)
    assert [e.title for e in found.entries] == [
        "DFlash CE", "DFlash BV w/o annealing", "DFlash BV", "DSpark CE", "DSpark BV",
    ]  # fmt: skip
    assert [task.title for task in found.tasks("pocket")] == ["Sums", "Functions", "Talk & 100% chat"]
    assert not differences(found)


def test_the_same_drafter_from_two_folders_is_told_apart(tmp_path):
    only = (("dflash", "CE"), ("dflash", "BV"))
    first = synthetic.write(tmp_path / "one" / "eval", synthetic.results(drafters=only))
    second = synthetic.write(tmp_path / "two" / "eval", synthetic.results(drafters=only[1:], shift=0.5))
    found = read_evaluations([first, second])
    assert [e.label for e in found.entries] == ["CE", "BV (one/eval)", "BV (two/eval)"]
    one, two = found.entries[1:]
    assert two.average("block", "paper").acceptance_length.value == pytest.approx(
        one.average("block", "paper").acceptance_length.value + 0.5
    )


def test_two_runs_of_one_loss_in_one_folder_go_by_name(tmp_path):
    first = synthetic.results(drafters=(("dflash", "BV"),))
    second = synthetic.results(drafters=(("dflash", "BV"),), prefix="other-")
    both = first.model_copy(
        update={part: getattr(first, part) + getattr(second, part) for part in ("drafters", "cells")}
    )
    found = read_evaluations([synthetic.write(tmp_path / "a", both)])
    assert [e.label for e in found.entries] == ["BV (dflash-bv)", "BV (other-dflash-bv)"]


def test_targets_of_one_name_go_by_fingerprint(tmp_path):
    first = synthetic.results()
    second = first.model_copy(update={"target_fingerprint": "f" * 16})
    folders = [synthetic.write(tmp_path / "a", first), synthetic.write(tmp_path / "b", second)]
    titles = read_evaluations(folders).targets
    assert titles == (f"pocket {first.target_fingerprint[:8]}", "pocket ffffffff")


def test_a_folder_given_twice_counts_once(tmp_path):
    folder = synthetic.write(tmp_path / "a", synthetic.results())
    assert len(read_evaluations([folder, tmp_path / "a" / ".." / "a"]).evaluations) == 1


def test_different_settings_are_said(tmp_path):
    first = synthetic.results(drafters=(("dflash", "CE"),))
    second = synthetic.results(drafters=(("dflash", "BV"),))
    second.settings["max_new_tokens"] = 32
    folders = [synthetic.write(tmp_path / "a", first), synthetic.write(tmp_path / "b", second)]
    assert differences(read_evaluations(folders)) == ["Evaluations of pocket differ in budget (a: 128; b: 32)."]


def test_what_makes_speeds_incomparable_is_said(tmp_path):
    def read(*changes):
        folders = []
        for name, (settings, provenance) in zip(("a", "b"), changes, strict=True):
            made = synthetic.results(drafters=(("dflash", "CE" if name == "a" else "BV"),))
            update = {"settings": made.settings | settings, "provenance": made.provenance | provenance}
            folders.append(synthetic.write(tmp_path / name, made.model_copy(update=update)))
        return differences(read_evaluations(folders))

    here = {"machine": "x86_64", "num_cpus": 2, "threads": 2, "num_processes": 1, "gpu": None}
    usual = {"dtype": "float32", "device": "cpu", "num_decoded": None, "num_proposals": None}
    assert read((usual, here), (usual, here)) == []
    assert read((usual, here), ({}, {})) == []  # of an earlier version, which does not tell
    there = {"machine": "aarch64", "num_cpus": 8, "threads": 4, "num_processes": 2, "gpu": "B200"}
    other = {"dtype": "bfloat16", "device": "cuda", "num_decoded": 5, "num_proposals": "auto"}
    said = "Evaluations of pocket differ in"
    assert read((usual, here), (other, there)) == [
        f"{said} decoded prompts of each task (a: all; b: 5).",
        f"{said} proposals (a: as trained; b: auto).",
        f"{said} dtype (a: float32; b: bfloat16), so their speeds cannot be compared.",
        f"{said} device (a: cpu; b: B200), so their speeds cannot be compared.",
        f"{said} machine (a: x86_64, 2 CPUs; b: aarch64, 8 CPUs), so their speeds cannot be compared.",
        f"{said} threads (a: 2; b: 4), so their speeds cannot be compared.",
        f"{said} processes (a: 1; b: 2), so their speeds cannot be compared.",
    ]


def test_what_was_not_decoded_has_no_speeds_to_compare(tmp_path):
    timed = synthetic.results(drafters=(("dflash", "CE"),))
    predicted = synthetic.results(drafters=(("dflash", "BV"),))
    timed.provenance["num_processes"], predicted.provenance["num_processes"] = 2, 1
    timed.settings["num_decoded"], predicted.settings["num_decoded"] = 4, 0
    tasks = [task.model_copy(update={"num_decoded": 0}) for task in predicted.tasks]
    silent = predicted.model_copy(update={"tasks": tasks})
    folders = [synthetic.write(tmp_path / "a", timed), synthetic.write(tmp_path / "b", silent)]
    comparison = read_evaluations(folders)
    assert differences(comparison) == []
    assert [note.split(":")[0] for note in undecoded(comparison)] == ["Nothing was decoded in b"]


def test_a_run_that_was_stopped_says_how_far_it_came(tmp_path):
    made = synthetic.results(drafters=(("dflash", "CE"), ("dflash", "BV")))
    stopped = {"step": 264, "num_steps": 20_000, "unfinished": True}

    def read(folder, *changes):
        drafters = [about.model_copy(update=each) for about, each in zip(made.drafters, changes, strict=True)]
        return read_evaluations([synthetic.write(tmp_path / folder, made.model_copy(update={"drafters": drafters}))])

    found = read("both", stopped, stopped)
    assert [e.label for e in found.entries] == ["CE at step 264 of 20,000", "BV at step 264 of 20,000"]
    assert found.evaluated() == "Evaluated checkpoints: the last ones of unfinished runs, step 264 of 20,000."
    mixed = read("one", {"step": 20_000, "num_steps": 20_000}, stopped | {"checkpoint": "best"})
    assert [e.label for e in mixed.entries] == ["CE", "BV at step 264 of 20,000"]
    assert mixed.evaluated() == (
        "Evaluated checkpoints: the final ones (DFlash CE); the best ones by held-out length of unfinished runs, step "
        "264 of 20,000 (DFlash BV at step 264 of 20,000)."
    )
    assert [e.about.progress for e in mixed.entries] == ["20,000 of 20,000", "264 of 20,000"]


def test_means_over_seeds_are_told_from_what_was_measured_once(tmp_path):
    made = synthetic.results()
    joined = [made.model_copy(update={"settings": made.settings | {"seeds": seeds}}) for seeds in ([1, 2], [1, 2, 3])]
    one, two, three = (
        synthetic.write(tmp_path / n, each) for n, each in zip(("one", "two", "three"), (made, *joined), strict=True)
    )
    sums = "; rounds, tokens and seconds are sums over them."
    assert read_evaluations([one]).over_seeds == ""
    assert read_evaluations([one]).caption("Lengths.") == "Lengths."
    assert read_evaluations([two]).caption("Lengths.") == f"Lengths. Means over 2 seeds{sums}"
    assert read_evaluations([one, two]).over_seeds == f"Means over 2 seeds (two){sums}"
    assert read_evaluations([two, three]).over_seeds == f"Means over 2 seeds (two) and 3 seeds (three){sums}"


def test_files_of_targets_never_share_a_name(tmp_path):
    folders = [
        synthetic.write(tmp_path / str(i), synthetic.results(name)) for i, name in enumerate(("a.b", "a-b", "c"))
    ]
    found = read_evaluations(folders)
    assert [found.file_name(target) for target in found.targets] == ["a-b-1", "a-b-2", "c"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no results.json"), ("{", "is damaged: it is not JSON"), ('{"format": "other"}', "format")],
)
def test_unreadable_folders(tmp_path, content, message):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(EvaluationError, match=message):
        read_evaluations([tmp_path])


def test_an_evaluation_without_drafters(tmp_path):
    folder = synthetic.write(tmp_path, synthetic.results(drafters=()))
    with pytest.raises(EvaluationError, match="no drafter was evaluated"):
        read_evaluations([folder])


def test_where_the_papers_temperature_is_the_best_one_measurement_is_both(tmp_path):
    made = synthetic.results(drafters=(("dflash", "BV"), ("dflash", "CE")))
    about = made.drafters[0].model_copy(update={"best_draft_temperature": {"block": 1.0, "token": 0.6}})
    only = [a for a in made.averages if (a.drafter, a.choice) != (about.name, "best")]
    folder = synthetic.write(
        tmp_path, made.model_copy(update={"drafters": [about, made.drafters[1]], "averages": only})
    )
    _, entry = read_evaluations([folder]).entries
    assert entry.average("block", "best") == entry.average("block", "paper")
    assert entry.average("token", "best") is None
    assert entry.average("greedy", "best") is None


def test_labels_beside_the_papers_stand_between_the_baselines_and_bv(tmp_path):
    """A variant of BV is not called BV, and comes before it; a drafter of unknown origin comes last."""
    made = synthetic.results(drafters=(("dflash", "BV"), ("dflash", "CE"), ("dflash", "BV w/o annealing")))
    template = made.drafters[0]
    more = [
        template.model_copy(update={"name": label, "label": label, "objective": objective})
        for label, objective in (("some-drafter", None), ("BV, beta to 0.5", "bv"), ("DPACE", "dpace"))
    ]
    folder = synthetic.write(tmp_path, made.model_copy(update={"drafters": [*made.drafters, *more]}))
    assert [e.label for e in read_evaluations([folder]).entries] == [
        "CE", "DPACE", "BV, beta to 0.5", "BV w/o annealing", "BV", "some-drafter",
    ]  # fmt: skip


def test_paired_ratios_are_found_in_one_evaluation_only(tmp_path):
    made = synthetic.paired(
        synthetic.results(drafters=(("dflash", "CE"), ("dflash", "BV"))), "dflash-bv", "dflash-ce", spread=0.1
    )
    folders = [synthetic.write(tmp_path / name, made) for name in ("a", "b")]
    first_ce, second_ce, first_bv, _ = read_evaluations(folders).entries
    ratio = first_bv.over(first_ce, "block", "paper", "acceptance_length")
    turned = first_ce.over(first_bv, "block", "paper", "acceptance_length")
    assert (turned.low, turned.value, turned.high) == pytest.approx((1 / ratio.high, 1 / ratio.value, 1 / ratio.low))
    assert first_bv.over(second_ce, "block", "paper", "acceptance_length") is None
    assert first_bv.over(first_ce, "greedy", "best", "acceptance_length") is None


def test_results_without_comparisons_are_read(tmp_path):
    folder = synthetic.write(tmp_path, synthetic.results())
    file = folder / "results.json"
    plain = json.loads(file.read_text())
    del plain["comparisons"]  # as evaluations wrote before there were any
    file.write_text(json.dumps(plain))
    assert read_evaluations([folder]).evaluations[0].results.comparisons == []
