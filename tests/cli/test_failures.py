"""What a mistake looks like: one line, an exit code, no traceback, whatever went wrong."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import typer

from blockdraft.cli import app as cli
from blockdraft.cli import main
from blockdraft.errors import BlockdraftError


@pytest.fixture
def run(monkeypatch, capsys):
    """Exit code, stdout and stderr of a command whose verb raises, or of the command as it is."""

    def call(*arguments, raises=None, cls=cli.Verb):
        if raises is not None:
            tree = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)

            @tree.callback()
            def root():
                pass

            @tree.command(cls=cls)
            def work(out: str = "runs/x"):  # noqa: ARG001
                raise raises

            monkeypatch.setattr(cli, "app", tree)
            arguments = ["work", *arguments]
        monkeypatch.setattr(sys, "argv", ["blockdraft", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, *capsys.readouterr()

    return call


class OwnError(BlockdraftError):
    pass


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (BlockdraftError("the prompt is empty"), "the prompt is empty"),
        (OwnError("every kind of it"), "every kind of it"),
        (OwnError("told in\ntwo lines, \x1b[31mred"), "told in two lines,  [31mred"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a/b"), "a/b: No such file or directory"),
        (PermissionError(errno.EACCES, "Permission denied", b"a/b"), "a/b: Permission denied"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "d"), "d: Is a directory"),
        (OSError(errno.EROFS, "Read-only file system", "d"), "d: Read-only file system"),
        (OSError(errno.ENOSPC, "No space left on device"), "runs/x: No space left on device"),
        (OSError("told in words alone"), "runs/x: told in words alone"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "runs/x: Connection refused"),
        (TimeoutError(), "runs/x: TimeoutError"),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_exit_code_2(run, error, line):
    assert run(raises=error) == (2, "", f"error: {line}\n")


def test_a_verb_without_a_folder_writes_to_standard_output():
    assert cli.describe(OSError(errno.ENOSPC, "No space left on device")) == "standard output: No space left on device"
    assert cli.describe(OSError(errno.ECONNRESET, "Connection reset")) == "Connection reset"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")  # noqa: PTH110
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["recipes", "ls"], ["generate", "--help"]])
def test_a_full_standard_output_is_one_line(arguments):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        command = [sys.executable, "-m", "blockdraft", *arguments]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, "error: standard output: No space left on device\n")


def test_ctrl_c_says_whether_the_same_command_resumes(run):
    assert run(raises=KeyboardInterrupt()) == (130, "", "stopped\n")
    stopped = (130, "", "stopped; the same command resumes\n")
    assert run(raises=KeyboardInterrupt(), cls=cli.ResumableVerb) == stopped


@pytest.fixture
def foreground():
    """Let signals act as in a foreground shell, whose background jobs ignore Ctrl-C and, under nohup, SIGHUP."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="signals of POSIX")
@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_verb_that_resumes_in_order(run, monkeypatch, name):
    number, cleaned = getattr(signal, name), []

    def work():
        try:
            os.kill(os.getpid(), number)
            time.sleep(30)
        finally:
            cleaned.append(True)

    assert _call(run, monkeypatch, work) == (128 + number, "", "stopped; the same command resumes\n")
    assert cleaned
    assert signal.getsignal(number) is signal.SIG_DFL  # as before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="signals of POSIX")
def test_nohup_keeps_its_meaning(run, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert _call(run, monkeypatch, lambda: os.kill(os.getpid(), signal.SIGHUP)) == (0, "", "")
    finally:
        signal.signal(signal.SIGHUP, before)


def _call(run, monkeypatch, work):
    tree = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    tree.command(cls=cli.ResumableVerb)(work)
    monkeypatch.setattr(cli, "app", tree)
    return run()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 4 bytes")])
def test_memory_that_is_not_there_is_one_line(run, error):
    code, out, err = run(raises=error)
    assert (code, out) == (2, "")
    assert err.startswith("error: there is not enough memory; ask for smaller batches")
    assert err.count("\n") == 1


def test_a_message_without_end_loses_its_middle(run):
    code, _, err = run(raises=BlockdraftError(f"{'x/' * 5000}: no such folder"))
    assert code == 2
    assert len(err) < 2100
    assert err.endswith("x/: no such folder\n")


def test_the_verbs_that_resume_are_those_that_keep_their_work():
    tree = typer.main.get_command(cli.app)
    groups = {"": tree, "data ": tree.commands["data"], "recipes ": tree.commands["recipes"]}
    resumes = {
        prefix + name
        for prefix, group in groups.items()
        for name, verb in group.commands.items()
        if getattr(verb, "resumes", False)
    }
    assert resumes == {"demo", "data regenerate", "train", "evaluate", "study"}
    for group in groups.values():
        assert all(isinstance(verb, cli.Verb) or hasattr(verb, "commands") for verb in group.commands.values())


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("a bug"), EOFError("a bug")])
def test_a_bug_shows_its_traceback(monkeypatch, error):
    tree = typer.Typer(pretty_exceptions_enable=False)

    @tree.command(cls=cli.Verb)
    def work():
        raise error

    monkeypatch.setattr(cli, "app", tree)
    monkeypatch.setattr(sys, "argv", ["blockdraft"])
    with pytest.raises(type(error), match="a bug"):
        main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["data", "prompt"], "No such command 'prompt'"),
        (["train"], "Missing argument 'RECIPE'"),
        (["generate", "--tempeature", "1", "hi"], "No such option: --tempeature"),
        (["generate", "--rule", "blok", "hi"], "Invalid value for '--rule': 'blok' is not one of"),
        (["generate", "--temperature", "inf", "hi"], "Invalid value for '--temperature'"),
        (["generate", "--temperature", "nan", "hi"], "Invalid value for '--temperature'"),
        (["generate", "--top-p", "nan", "hi"], "Invalid value for '--top-p'"),
        (["generate", "--seed", str(2**63), "hi"], "Invalid value for '--seed'"),
        (["generate", "--dtype", "float8", "hi"], "Invalid value for '--dtype'"),
        (["generate", "--compare", "hi"], "nothing to compare without --drafter"),
        (["generate", "--compare", "--drafter", "x", "--rule", "block", "hi"], "leave --rule out"),
        (
            ["evaluate", "--drafter", "x", "--out", "y", "--draft-temperatures", "1", "inf"],
            "inf is not a finite number",
        ),
        (["demo", "--target", "poket"], "'poket' is not one of pocket, smollm2"),
        (["data", "prompts", "--from", "pocket", "--num", "3", "--out", "/dev/null"], "name an ordinary file"),
    ],
)
def test_a_mistake_in_the_command_line_is_one_line_with_the_way_to_its_help(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "(see blockdraft" in err
    assert err.endswith("--help)\n")
    assert err.count("\n") == 1


MISSPELT = [
    ["generate", "hi", "--target"],
    ["data", "regenerate", "--prompts", "p.jsonl", "--out", "d", "--target"],
    ["data", "inspect", "d", "--target"],
    ["evaluate", "--drafter", "x", "--out", "e", "--target"],
    ["doctor", "x", "--target"],
    ["export", "x", "--out", "e", "--target"],
    ["export-target", "--out", "e"],
]


@pytest.fixture(scope="module")
def answers_to_misspelt():
    """Exit code, stderr, and whether PyTorch was imported by then, of each command; one process gives them all."""
    script = """
        import contextlib, io, json, sys
        from blockdraft.cli import main

        found = []
        for arguments in json.loads(sys.argv[1]):
            sys.argv = ["blockdraft", *arguments, "poket"]
            with contextlib.redirect_stderr(io.StringIO()) as told:
                try:
                    main()
                except SystemExit as stop:
                    found.append([stop.code, told.getvalue(), "torch" in sys.modules])
        print(json.dumps(found))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), json.dumps(MISSPELT)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    return json.loads(ended.stdout)


@pytest.mark.parametrize("number", range(len(MISSPELT)), ids=lambda number: " ".join(MISSPELT[number][:2]))
def test_a_misspelt_target_is_answered_before_pytorch_is_imported(answers_to_misspelt, number):
    assert len(answers_to_misspelt) == len(MISSPELT)
    code, told, has_torch = answers_to_misspelt[number]
    assert (code, has_torch) == (2, False)
    assert told.count("\n") == 1
    assert "poket: no such target or folder; did you mean pocket?" in told


def test_no_verb_at_all_shows_the_help(run):
    code, out, err = run()
    assert code == 2
    assert "Usage: blockdraft" in out + err
    assert "error" not in out + err


def test_the_version(run):
    assert run("--version") == (0, "0.1.0\n", "")


@pytest.mark.slow  # a process of its own
def test_output_that_nobody_reads_is_no_error():
    command = [sys.executable, "-m", "blockdraft", "recipes", "ls"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        err = process.stderr.read()
    assert "Traceback" not in err
    assert "error" not in err


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.usefixtures("foreground")
def test_a_real_ctrl_c(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(f'{{"id": "{i}", "turns": ["What is {i}?"]}}\n' for i in range(2000)))
    command = [sys.executable, "-m", "blockdraft", "data", "regenerate", "--target", "pocket"]
    command += ["--prompts", "p.jsonl", "--out", "d", "--shard-size", "4"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "d").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        err = process.communicate()[1]
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "stopped; the same command resumes"
    assert "Traceback" not in err
