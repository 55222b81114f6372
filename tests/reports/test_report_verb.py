"""`blockdraft report` as a user types it."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from blockdraft.cli.app import app

from commands import blockdraft


def test_table_and_place_on_stdout(evaluations, tmp_path):
    done = CliRunner().invoke(app, ["report", str(evaluations[1]), "--out", str(tmp_path)])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[5].split() == ["Qwen_3", "CE", "4.02", "2.74×", "3.42", "2.33×"]
    assert lines[-1] == f"{tmp_path}/report.html: 9 tables, 6 figures"
    assert str(tmp_path / "tables" / "main.tex") in done.stderr
    assert (tmp_path / "report.html").exists()
    assert {file.suffix for file in (tmp_path / "tables").iterdir()} == {".md", ".tex", ".csv"}
    assert not list(tmp_path.rglob("*.unfinished"))


@pytest.mark.slow
def test_json_has_the_paths(evaluations, tmp_path):
    done = CliRunner().invoke(app, ["report", str(evaluations[1]), "--out", str(tmp_path), "--json"])
    found = json.loads(done.stdout)
    assert found["report"] == str(tmp_path / "report.html")
    assert str(tmp_path / "tables" / "main.csv") in found["tables"]
    assert str(tmp_path / "figures" / "retention-qwen-3-dflash.svg") in found["figures"]


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    done = blockdraft("report", tmp_path, "--out", tmp_path / "out")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {tmp_path} has no results.json; `blockdraft evaluate --out` writes it\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow  # a process of its own for each
@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_without_the_extra_it_says_what_to_install(evaluations, tmp_path, package):
    script = f"""
import sys
import blockdraft.evaluation
sys.modules[{package!r}] = None
from blockdraft.cli import main
sys.argv = ["blockdraft", "report", {str(evaluations[1])!r}, "--out", {str(tmp_path)!r}]
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    install = "pip install 'blockdraft[reports]'"
    assert done.stderr == f"error: reports need the package {package}, which is not installed: {install}\n"
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_a_mistake():
    assert CliRunner().invoke(app, ["report"]).exit_code == 2
