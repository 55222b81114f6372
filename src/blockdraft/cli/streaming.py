"""Text as it is decoded, coloured by what verification made of each token."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from blockdraft.decoding import Generation, Round
from blockdraft.targets import Target

STYLES = {"accepted": "green", "correction": "yellow", "bonus": "cyan", "target": ""}


class Stream:
    """Prints rounds as they come, up to the budget, and a closing line."""

    def __init__(self, target: Target, console: Console, max_new_tokens: int, *, silent: bool = False) -> None:
        self.target, self.console, self.max_new_tokens, self.silent = target, console, max_new_tokens, silent
        self.tokens: list[int] = []
        self.shown = 0

    def show(self, record: Round) -> None:
        """One round: its accepted tokens, then the token the target added."""
        whole = record.accepted == len(record.drafted)
        last = "target" if not record.drafted else "bonus" if whole else "correction"
        kinds = ["accepted"] * record.accepted + ([] if record.next_token is None else [last])
        for token, kind in zip(record.tokens, kinds, strict=True):
            if len(self.tokens) < self.max_new_tokens:
                self._print(token, kind)

    def close(self, out: Generation, label: str) -> None:
        """Acceptance length and speed."""
        if self.silent:
            return
        num, speed = len(out.tokens), len(out.tokens) / out.seconds
        line = f"\n\n[{label}] {num} tokens, {out.acceptance_length:.2f} per verification, {speed:.1f} tokens/s"
        self.console.print(line, style="dim", markup=False)

    def _print(self, token: int, kind: str) -> None:
        """The text that this token completes; bytes of an unfinished character wait for the next one."""
        self.tokens.append(token)
        text = self.target.decode(self.tokens)
        if self.silent or text.endswith("�"):
            return
        self.console.print(Text(text[self.shown :], style=STYLES[kind]), end="")
        self.shown = len(text)


def as_dict(out: Generation) -> dict[str, Any]:
    """A generation as plain values."""
    return asdict(out) | {"acceptance_length": out.acceptance_length, "seconds": out.seconds}
