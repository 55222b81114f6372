"""The command line as a user types it, run in this process: a subprocess would import everything again."""

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from blockdraft.cli import main


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def blockdraft(*arguments: object, cwd: Path | str = ".") -> Ended:
    """Run ``blockdraft ARGUMENTS`` in a folder."""
    words = [str(each) for each in arguments]
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["blockdraft", *words]),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())
