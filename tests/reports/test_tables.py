"""Cells against numbers worked out by hand, in every form a table is written in."""

import csv
import io
import json
import shutil
import subprocess
from xml.etree import ElementTree

import pytest

from blockdraft.evaluation.results import Interval
from blockdraft.losses import objective, objective_names
from blockdraft.reports import Table, read_evaluations, tables
from blockdraft.reports.page import table_html
from blockdraft.reports.paper_tables import AIMS
from blockdraft.reports.table import MISSING, CellValue, Column, TableRow, best_in_columns, times, with_interval

import synthetic


@pytest.fixture(scope="module")
def found(evaluations):
    return {table.name: table for table in tables(read_evaluations(evaluations))}


def rows(table: Table) -> dict[tuple[str, ...], list[str]]:
    return {row.labels: [f"*{v.text}*" if v.best else v.text for v in row.values] for row in table.rows}


def test_which_tables_there_are(found):
    assert list(found) == [
        "main", "gains", "best-temperature", "one-hot", "token-verification", "annealing", "gains-pocket",
        "full-pocket", "full-qwen-3", "objectives", "retention-pocket", "retention-qwen-3", "lengths", "seconds",
    ]  # fmt: skip


def test_main(found):
    # DFlash, CE, greedy: 3 + 0.6 + (0.5 + 0 - 0.75) / 3 = 3.5167
    table = found["main"]
    assert [column.heads for column in table.columns[:2]] == [
        ("T=0 (greedy)", "DFlash", "τ"), ("T=0 (greedy)", "DFlash", "Speed-up"),
    ]  # fmt: skip
    assert table.columns[-1].heads == ("T=1 (block verification)", "DSpark", "Speed-up")
    cells = rows(table)
    assert [cells["pocket", "CE"][i] for i in (0, 2, 4, 6)] == ["3.52", "4.02", "2.92", "3.42"]
    assert [cells["pocket", "BV"][i] for i in (0, 2, 4, 6)] == ["*4.27*", "*4.77*", "*3.67*", "*4.17*"]
    assert list(cells) == [("pocket", "CE"), ("pocket", "BV"), ("Qwen_3", "CE"), ("Qwen_3", "KL"), ("Qwen_3", "BV")]
    assert cells["Qwen_3", "KL"][2:4] == ["–", "–"]
    assert cells["Qwen_3", "KL"][4] == "3.54"
    assert cells["Qwen_3", "BV"][4] == "*4.17*"
    # sums: 350 tokens in 0.2 + 1.5 s; functions: 600 in 3.2; talk: 675 in 4.7; each over 90 tokens/s
    speedup = (350 / 1.7 + 600 / 3.2 + 675 / 4.7) / 90 / 3
    assert cells["pocket", "CE"][5] == f"{speedup:.2f}×" == "1.99×"


def test_best_temperature_token_verification_annealing(found):
    assert rows(found["best-temperature"])["pocket", "CE"][:3] == ["0.7", "3.20", "3.17"]
    assert rows(found["token-verification"]) == {
        ("pocket", "DFlash"): ["2.82", "–", "*3.57*"],
        ("pocket", "DSpark"): ["3.32", "–", "*4.07*"],
        ("Qwen_3", "DFlash"): ["3.32", "3.44", "*4.07*"],
    }
    assert rows(found["annealing"]) == {
        ("Baseline (CE)",): ["3.52", "2.92", "4.02", "3.42"],
        ("BV w/o annealing",): ["4.02", "3.42", "–", "–"],
        ("BV with annealing",): ["*4.27*", "*3.67*", "*4.77*", "*4.17*"],
    }


def test_annealing_needs_a_drafter_without(tmp_path):
    for number, drafters in enumerate([(("dflash", "CE"), ("dflash", "BV")), (("dflash", "BV w/o annealing"),)]):
        folder = synthetic.write(tmp_path / str(number), synthetic.results(drafters=drafters))
        assert "annealing" not in {table.name for table in tables(read_evaluations([folder]))}


def labelled(made, **labels):
    """Return the same evaluation with other labels for some drafters, given by name with _ for -."""
    new = {name.replace("_", "-"): label for name, label in labels.items()}
    drafters = [each.model_copy(update={"label": new.get(each.name, each.label)}) for each in made.drafters]
    return made.model_copy(update={"drafters": drafters})


def test_annealing_has_every_variant_of_bv_with_its_label(tmp_path):
    drafters = tuple(("dflash", label) for label in ("CE", "LK", "BV w/o annealing", "BV"))
    made = labelled(synthetic.results(drafters=drafters), dflash_bv="BV (beta over 100%)")
    more = synthetic.results(drafters=(("dflash", "BV"),), prefix="further-", shift=0.1)
    more = labelled(more, further_dflash_bv="D-PACE, then BV")
    folders = [synthetic.write(tmp_path / name, each) for name, each in (("a", made), ("b", more))]
    found = {table.name: rows(table) for table in tables(read_evaluations(folders))}
    assert found["annealing"] == {
        ("Baseline (CE)",): ["3.52", "2.92"],
        ("BV w/o annealing",): ["4.02", "3.42"],
        ("BV (beta over 100%)",): ["4.27", "3.67"],
        ("D-PACE, then BV",): ["*4.37*", "*3.77*"],
    }
    labels = ["CE", "LK", "BV (beta over 100%)", "D-PACE, then BV"]
    assert [label for _, label in found["main"]] == labels
    assert {label for _, _, label in found["full-pocket"]} == set(labels)
    assert {label for _, label in found["one-hot"]} == {*labels, "BV w/o annealing"}


@pytest.mark.parametrize("rules", [("greedy", "token", "block"), ("token",)])
def test_bv_without_annealing_is_left_to_the_table_of_annealing_only_if_that_shows_it(tmp_path, rules):
    drafters = (("dflash", "CE"), ("dflash", "BV w/o annealing"))[len(rules) == 3 :]
    folder = synthetic.write(tmp_path, synthetic.results(drafters=drafters, rules=rules))
    found = {table.name: table for table in tables(read_evaluations([folder]))}
    assert "annealing" not in found
    assert "BV w/o annealing" in {column.heads[1] for column in found["token-verification"].columns}
    assert "BV w/o annealing" in {row.labels[2] for row in found["full-pocket"].rows}


def test_bv_without_annealing_has_a_column_for_one_target_though_another_target_shows_it_elsewhere(tmp_path):
    alone = synthetic.results("Other", drafters=(("dflash", "BV w/o annealing"),))
    folders = [synthetic.write(tmp_path / each.target, each) for each in (synthetic.results(), alone)]
    found = {table.name: table for table in tables(read_evaluations(folders))}["token-verification"]
    column = [column.heads[1] for column in found.columns].index("BV w/o annealing")
    shown = {target: values[column] for (target, kind), values in rows(found).items() if kind == "DFlash"}
    assert shown == {"pocket": "–", "Other": "3.32"}


def test_captions_say_which_checkpoint_was_evaluated(found, tmp_path):
    papers = ("main", "token-verification", "annealing", "full-pocket", "full-qwen-3")
    others = ("gains", "gains-pocket", "best-temperature", "one-hot", "retention-pocket", "retention-qwen-3", "lengths")
    assert all("Evaluated checkpoints: the final ones. " in found[name].caption for name in (*papers, *others))
    made = synthetic.results()

    def captions(*which):
        drafters = [d.model_copy(update={"checkpoint": w}) for d, w in zip(made.drafters, which, strict=True)]
        folder = synthetic.write(tmp_path, made.model_copy(update={"drafters": drafters}))
        of = {table.name: table.caption for table in tables(read_evaluations([folder]))}
        return [of[name] for name in papers[:4]]

    for caption in captions(*["best"] * 5):
        assert "Evaluated checkpoints: the best ones by held-out length. " in caption
    for caption in captions(*[None] * 5):
        assert "Evaluated checkpoints: those in the folders given, not recorded as final or best. " in caption
    mixed = (
        "the final ones (DFlash CE, DFlash BV w/o annealing, DFlash BV, DSpark CE); the best ones by held-out length"
    )
    for caption in captions("last", "last", "last", "last", "best"):
        assert f"Evaluated checkpoints: {mixed} (DSpark BV). " in caption


def test_objectives_are_compared_as_in_the_paper(found):
    table = found["objectives"]
    assert [column.heads[0] for column in table.columns] == [
        "Training objective", "Uses the target's probabilities?", "Verification-aware?", "Block-aware?",
    ]  # fmt: skip
    assert rows(table) == {
        ("CE",): ["Maximize log-likelihood", "no", "no", "no"],
        ("KL",): ["Minimize KL divergence", "yes", "no", "no"],
        ("BV",): ["Maximize block acceptance length", "yes", "yes", "yes"],
    }
    assert set(AIMS) == set(objective_names())
    for name, aim in AIMS.items():
        assert aim.target == objective(name).needs_target, name


def test_full(found):
    table = found["full-pocket"]
    assert table.columns[1].heads == ("Math", "Sums", "τ")
    assert table.columns[-1].heads == ("", "Avg.", "τ")
    cells = rows(table)["T=1 (block verification)", "DFlash", "BV"]
    assert cells[1::2] == ["*4.25*", "*3.75*", "*3.00*", "*3.67*"]


def synthetic_retention(task: str, label: str = "CE") -> list[float]:
    """Pr(accepted >= i): position i is kept with 0.62 + 0.08 (loss + task) + 0.03 (i - 1), if all before it were."""
    kept = [1.0]
    for i in range(synthetic.BLOCK):
        kept.append(kept[-1] * (0.62 + 0.08 * (synthetic.LOSS[label] + synthetic.TASK[task]) + 0.03 * i))
    return kept[1:]


def test_gains(found):
    cells = rows(found["gains"])
    assert {(target, *names) for target, _, *names in cells} == {("pocket", "DFlash BV", "DFlash CE")}
    predicted = (3.78 - 0.25 / 3) / (3.03 - 0.25 / 3) - 1
    shown = f"{predicted:+.1%} [{predicted - 0.02:+.1%}, {predicted + 0.02:+.1%}]"
    assert (
        cells["pocket", "T=1 (block verification)", "DFlash BV", "DFlash CE"][0] == shown == "+25.5% [+23.5%, +27.5%]"
    )
    assert len(cells) == 7  # greedy, and two rules at three choices of the draft temperature
    lines = list(csv.DictReader(io.StringIO(found["gains"].csv())))
    assert float(lines[0]["predicted_length_gain_low"]) == pytest.approx(
        float(lines[0]["predicted_length_gain"]) - 0.02
    )


def test_a_gain_that_its_interval_denies_is_not_printed(tmp_path):
    made = synthetic.results(drafters=(("dflash", "CE"), ("dflash", "BV")))
    folder = synthetic.write(tmp_path, synthetic.paired(made, "dflash-bv", "dflash-ce", spread=0.3))
    table = next(t for t in tables(read_evaluations([folder])) if t.name == "gains")
    assert all(value.text.startswith("undecided [-") for row in table.rows for value in row.values)


def test_two_drafters_that_are_each_others_baselines_are_compared_once(tmp_path):
    made = synthetic.results(drafters=(("dflash", "CE"), ("dflash", "LK"), ("dflash", "BV")))
    for pair in (("ce", "lk"), ("lk", "ce"), ("bv", "ce"), ("bv", "lk")):
        made = synthetic.paired(made, *(f"dflash-{each}" for each in pair))
    table = next(t for t in tables(read_evaluations([synthetic.write(tmp_path, made)])) if t.name == "gains")
    pairs = [row.labels[2:] for row in table.rows if row.labels[1] == "T=0 (greedy)"]
    assert pairs == [("DFlash LK", "DFlash CE"), ("DFlash BV", "DFlash CE"), ("DFlash BV", "DFlash LK")]


def test_gains_by_task(found):
    table = found["gains-pocket"]
    assert [column.heads for column in table.columns] == [
        ("Math", "Sums"), ("Code", "Functions"), ("Chat", "Talk & 100% chat"), ("", "Avg."),
    ]  # fmt: skip
    cells = rows(table)
    assert (
        len(cells) == 2 * 7
    )  # predicted and measured: greedy, and two rules at three choices of the draft temperature
    shown = cells["T=1 (block verification)", "DFlash BV", "DFlash CE", "τ measured"]
    gains = [0.75 / (3 + shift) for shift in (0.5, 0.0, -0.75, -0.25 / 3)]
    assert shown == [f"{gain:+.1%} [{gain - 0.02:+.1%}, {gain + 0.02:+.1%}]" for gain in gains]
    assert shown[-1] == rows(found["gains"])["pocket", "T=1 (block verification)", "DFlash BV", "DFlash CE"][1]
    line = next(csv.DictReader(io.StringIO(table.csv())))
    assert (line["over"], line["quantity"]) == ("DFlash CE", "τ predicted")
    assert float(line["talk_2_gain_high"]) == pytest.approx(float(line["talk_2_gain"]) + 0.02)


def test_results_that_compare_no_single_tasks_have_no_table_of_gains_by_task(tmp_path):
    made = synthetic.paired(synthetic.results(), "dflash-bv", "dflash-ce")
    plain = json.loads(made.model_dump_json())
    plain["comparisons"] = [each for each in plain["comparisons"] if each.pop("task") is None]  # as was written before
    (tmp_path / "results.json").write_text(json.dumps(plain))
    names = [table.name for table in tables(read_evaluations([tmp_path]))]
    assert "gains" in names
    assert "gains-pocket" not in names


def test_captions_say_where_the_best_draft_temperature_is_at_an_end_of_its_grid(found, tmp_path):
    assert not [name for name, table in found.items() if "that was tried" in table.caption]
    made = synthetic.results(drafters=(("dflash", "CE"), ("dflash", "BV")))  # best at 0.8 and 0.6
    ce, bv = made.drafters
    low = bv.model_copy(update={"temperatures": bv.temperatures[1:]})
    high = ce.model_copy(update={"temperatures": ce.temperatures[:3]})
    folder = synthetic.write(tmp_path, made.model_copy(update={"drafters": [high, low]}))
    said = (
        "The best draft temperature is the highest that was tried for DFlash CE (token and block verification); the "
        "lowest that was tried for DFlash BV (token and block verification), so one beyond may be better."
    )
    captions = {table.name: table.caption for table in tables(read_evaluations([folder]))}
    assert {name for name, caption in captions.items() if said in caption} == {"best-temperature", "lengths"}


def test_one_hot(found):
    table = found["one-hot"]
    assert table.columns[0].heads == ("T=1 (block verification)", "DFlash", "τ predicted")
    assert rows(table)["pocket", "CE"][:2] == ["2.75", "2.72"]
    assert rows(table)["pocket", "BV"][:2] == ["*3.50*", "*3.47*"]


def test_what_people_read_says_argmax_drafts_and_not_one_hot(found):
    assert found["one-hot"].title == "Argmax drafts"
    for table in found.values():
        read = [table.title, table.caption, *(label for row in table.rows for label in row.labels)]
        read += [head for column in table.columns for head in column.heads]
        assert not [text for text in read if "hot" in text.lower().replace("-", " ").split()]


def test_retention_by_task_and_pooled(found):
    table = found["retention-pocket"]
    assert "Decoded prompts: 40 of Sums, 30 of Functions, 20 of Talk & 100% chat." in table.caption
    assert list(dict.fromkeys(row.labels[0] for row in table.rows)) == [
        "Sums", "Functions", "Talk & 100% chat", "All tasks pooled",
    ]  # fmt: skip
    cells = rows(table)
    expected = synthetic_retention("sums")
    assert cells["Sums", "DFlash", "CE"] == ["100", f"{sum(expected):.2f}", *(f"{k:.1%}" for k in expected)]
    weights = {"sums": 100, "functions": 200, "talk_2": 300}
    by_task = {task: synthetic_retention(task, "BV") for task in weights}
    pooled = [sum(n * by_task[task][i] for task, n in weights.items()) / 600 for i in range(synthetic.BLOCK)]
    shown = [f"*{k:.1%}*" for k in pooled]
    assert cells["All tasks pooled", "DFlash", "BV"] == ["600", f"{sum(pooled):.2f}", *shown]
    assert "T=1 (block verification)" in table.caption


def test_lengths_and_seconds(found):
    row = rows(found["lengths"])["pocket", "T=1 (block verification)", "DFlash", "CE"]
    whole = sum(synthetic_retention(task)[-1] for task in ("sums", "functions", "talk_2")) / 3
    assert row == ["1", "2.95 [2.90, 3.00]", "2.92 [2.82, 3.02]", "1.92 [1.82, 2.02]", f"{whole:.1%}"]
    hot = rows(found["lengths"])["pocket", "T=1 (block verification), argmax drafts", "DFlash", "CE"]
    assert hot[:3] == ["0", "2.75 [2.70, 2.80]", "2.72 [2.62, 2.82]"]
    labels = [row.labels for row in found["lengths"].rows]
    assert len(labels) == len(set(labels)) == 5 * 7 + 3 * 7
    spent = rows(found["seconds"])
    assert spent["pocket", "T=1 (block verification)", "DFlash", "CE"] == [
        "0.60", "2.40", "6.00", "0.60", "9.60", "1,625", "169.3",
    ]  # fmt: skip
    assert spent["pocket", "T=1 (block verification)", "Autoregressive", ""] == [
        "0.60", "–", "17.16", "0.30", "18.06", "1,625", "90.0",
    ]  # fmt: skip


def test_only_what_was_measured(tmp_path):
    folder = synthetic.write(tmp_path, synthetic.results(drafters=(("dspark", "BV"),), rules=("greedy",)))
    left = {table.name: table for table in tables(read_evaluations([folder]))}
    assert list(left) == ["main", "full-pocket", "objectives", "retention-pocket", "lengths", "seconds"]
    assert rows(left["main"]) == {("pocket", "BV"): ["4.77", "3.26×"]}  # alone, so nothing is the best


def test_csv_has_full_precision_and_no_invented_number(found):
    lines = list(csv.DictReader(io.StringIO(found["main"].csv())))
    first = lines[0]
    assert (first["target"], first["loss"]) == ("pocket", "CE")
    assert float(first["greedy_dflash_tau"]) == (4.1 + 3.6 + 2.85) / 3
    assert float(first["greedy_dflash_tau_low"]) == pytest.approx((4.1 + 3.6 + 2.85) / 3 - 0.1, abs=1e-12)
    assert lines[1]["target"] == "pocket"  # repeated, for programs
    assert lines[2]["greedy_dspark_tau"] == lines[2]["greedy_dspark_tau_high"] == ""
    assert float(next(csv.DictReader(io.StringIO(found["seconds"].csv())))["tokens"]) == 1985


def test_markdown(found):
    lines = found["main"].markdown().splitlines()
    assert lines[0].startswith("**Main results.** ")
    assert lines[2].startswith("| Target | Loss | T=0 (greedy)<br>DFlash<br>τ |")
    assert lines[3] == "| --- | --- |" + " ---: |" * 8
    assert lines[5].startswith("|  | BV | **4.27** | **2.91×** |")
    assert lines[6].startswith(r"| Qwen\_3 | CE | 4.02 |")
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_an_interval_without_width_is_not_shown():
    """Over a single prompt every resample is the same, which would look like certainty."""
    known, unknown = Interval(value=1.5, low=1.25, high=1.75), Interval(value=1.5, low=1.5, high=1.5)
    assert [with_interval(each).text for each in (known, unknown)] == ["1.50 [1.25, 1.75]", "1.50"]
    assert [with_interval(each).interval for each in (known, unknown)] == [(1.25, 1.75), None]
    assert times(unknown).interval is None


def test_ties_as_shown_are_all_best():
    values = [
        CellValue("4.00", 4.004, ranked=True),
        CellValue("4.00", 3.996, ranked=True),
        CellValue("3.99", 3.99, ranked=True),
        MISSING,
    ]
    marked = best_in_columns([TableRow((str(i),), (value,)) for i, value in enumerate(values)], 0)
    assert [row.values[0].best for row in marked] == [True, True, False, False]


def hostile() -> Table:
    text = r"50% & $x_1^2$ #{a}~\b|<i>"
    return Table(
        "odd", text, text, (text,), (Column((text, "τ"), "k"),), (TableRow((text,), (CellValue("1.00×", 1.0),)),)
    )


def test_hostile_text_is_escaped():
    latex = hostile().latex()
    assert (
        r"50\% \& \$x\_1\textasciicircum{}2\$ \#\{a\}\textasciitilde{}\textbackslash{}b\textbar{}\textless{}i" in latex
    )
    assert r"1.00$\times$" in latex
    assert r"\|\<i\>" in hostile().markdown()
    assert ElementTree.fromstring(table_html(hostile())).find(".//tbody//th").text == r"50% & $x_1^2$ #{a}~\b|<i>"


def test_html_spans(found):
    table = ElementTree.fromstring(table_html(found["full-pocket"]))
    first = table.findall("./thead/tr")
    assert [(c.text, c.get("rowspan") or c.get("colspan")) for c in first[0]] == [
        ("Setting", "3"), ("Drafter", "3"), ("Loss", "3"), ("Math", "2"), ("Code", "2"), ("Chat", "2"), (None, "2"),
    ]  # fmt: skip
    body = table.findall("./tbody/tr")
    assert [c.get("rowspan") for c in body[0].findall("th")] == ["4", "2", None]
    for row in body:
        assert len(row.findall("td")) == 8
    assert body[1].find("td/strong").text == "3.17×"
    assert body[1].findall("td")[1].get("title") == "95% interval: 4.75 to 4.95"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")
def test_latex_compiles(found, tmp_path):
    everything = [*found.values(), hostile()]
    for table in everything:
        (tmp_path / f"{table.name}.tex").write_text(table.latex())
    inputs = "\n".join(f"\\input{{{table.name}}}" for table in everything)
    (tmp_path / "all.tex").write_text(
        f"\\documentclass{{article}}\\usepackage{{booktabs,graphicx}}\\begin{{document}}\n{inputs}\n\\end{{document}}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
