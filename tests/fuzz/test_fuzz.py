"""The short version of ``make fuzz``: a few hundred bad inputs, none of which is met by a traceback or by silence."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import argument_classes, damage
from fuzz.classes import CLASSES
from fuzz.running import Case, Expect, Verdict, judge

TESTS = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="children are limited as on Linux")

LINE = "error: x.json cannot be read: No such file or directory\n"


@pytest.mark.parametrize(
    ("expect", "code", "err", "left", "verdict"),
    [
        (Expect.REFUSED, 2, LINE, [], Verdict.REFUSED),
        (Expect.EITHER, 2, LINE, [], Verdict.REFUSED),
        (Expect.EITHER, 0, "", [], Verdict.ACCEPTED),
        (Expect.WORKS, 0, "", [], Verdict.ACCEPTED),
        (Expect.REFUSED, 0, "", [], Verdict.SILENT),
        (Expect.WORKS, 2, LINE, [], Verdict.UNTIDY),
        (Expect.REFUSED, 2, LINE + LINE, [], Verdict.UNTIDY),
        (Expect.REFUSED, 2, LINE + "and more\n", [], Verdict.UNTIDY),
        (Expect.REFUSED, 2, "", [], Verdict.UNTIDY),
        (Expect.REFUSED, 2, "error: \x1b[31mred\n", [], Verdict.UNTIDY),
        (Expect.REFUSED, 2, LINE, ["new/x.1.unfinished"], Verdict.UNTIDY),
        (Expect.EITHER, 1, LINE, [], Verdict.TRACEBACK),
        (Expect.EITHER, -11, "", [], Verdict.TRACEBACK),
        (Expect.EITHER, 0, "Traceback (most recent call last):\n", [], Verdict.TRACEBACK),
    ],
)
def test_the_judge_knows_every_fault(expect, code, err, left, verdict):
    assert judge(Case("x", (), expect=expect), code, "", err, left)[0] is verdict


def test_the_judge_wants_the_words_that_a_case_asks_for():
    assert judge(Case("x", (), says="did you mean"), 2, "", LINE, [])[0] is Verdict.UNTIDY
    assert judge(Case("x", (), says="x.json"), 2, "", LINE, [])[0] is Verdict.REFUSED


def test_damage_damages_and_the_same_seed_does_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = json.dumps({"a": 1, "b": {"c": ["x", 2.5]}, "d": None})
    contents = []
    for _ in range(2):
        found = []
        Path("f.json").write_text(good)
        for name, do in [
            *damage.of_json("f.json", random.Random(5), 20),
            *damage.of_bytes("f.json", random.Random(5), 3),
        ]:
            Path("f.json").write_text(good)
            do()
            assert Path("f.json").read_bytes() != good.encode(), name
            found.append((name, Path("f.json").read_bytes()))
        contents.append(found)
    assert contents[0] == contents[1]
    assert len(dict(contents[0])) > 20


def test_every_number_that_a_verb_takes_is_tried():
    found = argument_classes.options(int, float)
    assert ("generate", "--temperature") in found
    assert ("data regenerate", "--timeout") in found
    assert len(found) > 30


@pytest.mark.slow
def test_bad_input_is_met_by_one_line(tmp_path):
    """One process, which forks itself for every case; it has PyTorch loaded only once."""
    folders = [TESTS, TESTS / "data", TESTS / "training"]
    path = os.pathsep.join(map(str, [*folders, *filter(None, [os.environ.get("PYTHONPATH")])]))
    command = [sys.executable, "-m", "fuzz", "--scale", "1", "--limit", "300", "--json", str(tmp_path / "found.json")]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) >= 250
    assert {each["class"] for each in found} == set(CLASSES)
    assert {each["verdict"] for each in found} == {Verdict.REFUSED, Verdict.ACCEPTED}
    assert sum(each["verdict"] == Verdict.REFUSED for each in found) > len(found) / 2
