"""The command as a user types it: what it prints, and what a mistake looks like."""

import json
import subprocess
import sys

import pytest
import torch

from blockdraft.cli import main
from blockdraft.drafters import save_drafter

from tiny import tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    target = tiny_target(dtype=torch.float32)
    root = tmp_path_factory.mktemp("models")
    target.save(root / "target")
    save_drafter(tiny_drafter("dflash", target), root / "drafter")
    return root


def run(monkeypatch, capsys, *arguments):
    """Exit code, stdout and stderr of ``blockdraft generate``."""
    monkeypatch.setattr(sys, "argv", ["blockdraft", "generate", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, *capsys.readouterr()


def test_text_and_a_closing_line(folders, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "--target", folders / "target", "--max-new-tokens", 12, "w7 w8")
    assert code == 0
    text, closing = out.strip().rsplit("\n", 1)
    assert all(word.startswith("w") or word in ("user", "assistant") for word in text.split())
    assert closing.startswith("[no drafter]")
    assert "tokens/s" in closing
    assert "\x1b" not in out  # plain when stdout is no terminal


def test_what_a_last_block_adds_beyond_the_budget_is_not_shown(folders, monkeypatch, capsys):
    arguments = ["--target", folders / "target", "--drafter", folders / "drafter", "--seed", 3, "w7 w8"]
    for budget in range(1, 12):
        code, out, _ = run(monkeypatch, capsys, *arguments, "--max-new-tokens", budget)
        assert code == 0
        assert len(out.strip().rsplit("\n", 1)[0].split()) <= budget


def test_compare_shows_both_rules(folders, monkeypatch, capsys):
    arguments = ["--target", folders / "target", "--drafter", folders / "drafter", "--max-new-tokens", 12, "w7"]
    code, out, _ = run(monkeypatch, capsys, *arguments, "--compare")
    assert code == 0
    assert out.count("per verification") == 2
    assert "[token]" in out
    assert "[block]" in out


def test_json_holds_every_round(folders, monkeypatch, capsys):
    arguments = ["--target", folders / "target", "--drafter", folders / "drafter", "--max-new-tokens", 12, "--json"]
    code, out, _ = run(monkeypatch, capsys, *arguments, "--rule", "token", "w7")
    assert code == 0
    result = json.loads(out)["token"]
    assert len(result["tokens"]) <= 12
    assert {"drafted", "accepted", "next_token", "seconds"} == set(result["rounds"][0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "blok", "w7"], "'blok' is not one of greedy, token, block"),
        (["--compare", "w7"], "nothing to compare without --drafter"),
        (["--max-new-tokens", "0", "w7"], "max-new-tokens"),
        (["--temperature", "-1", "w7"], "temperature"),
        (["--tempeature", "1", "w7"], "No such option"),
        (["--target", "./nowhere", "w7"], "no such folder"),
        (["--drafter", "./nowhere", "w7"], "no such folder"),
        ([], "Missing argument"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(folders, arguments, message, monkeypatch, capsys):
    if "--target" not in arguments:
        arguments = ["--target", folders / "target", *arguments]
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err + out


def test_the_module_runs():
    done = subprocess.run(
        [sys.executable, "-m", "blockdraft", "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.strip() == "0.1.0"
