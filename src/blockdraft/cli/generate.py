"""``blockdraft generate`` decodes one answer, coloured by what verification made of each token."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from blockdraft.cli.options import (
    AsJson,
    Device,
    Dtype,
    NumProposals,
    RuleName,
    Seed,
    TargetName,
    TopK,
    TopP,
    as_num_proposals,
    finite,
    precision,
    print_json,
)

if TYPE_CHECKING:
    from rich.console import Console

    from blockdraft.decoding import Generation, Round, RoundCosts
    from blockdraft.drafters import Drafter
    from blockdraft.targets import Target
    from blockdraft.verification import Rule

TOKEN_STYLES = {"accepted": "green", "correction": "yellow", "bonus": "cyan", "target": ""}


def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The user's message; with --raw, the text to continue.")
    ],
    target: TargetName = "pocket",
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The drafter: one that comes with blockdraft (see drafters ls), a drafter's or a run's folder (or "
            "RUN@last), or a Hugging Face id.",
            show_default="none: decode autoregressively",
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue PROMPT as it stands instead of answering it as a chat message.")
    ] = False,
    rule: Annotated[
        RuleName | None,
        typer.Option(
            help="How drafts are verified: block and token sample, greedy takes the target's most probable tokens.",
            show_default="block",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            callback=finite,
            help="The target's temperature; the rule greedy takes none.",
            show_default="1",
        ),
    ] = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    draft_temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            callback=finite,
            help="The drafter's temperature, which changes the speed and never the distribution of the text.",
            show_default="the target's",
        ),
    ] = None,
    num_proposals: NumProposals = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Stop after N tokens.")] = 256,
    seed: Seed = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Answer twice, with token and with block verification.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Decode one answer and show what verification kept.

    Accepted tokens are green, corrections yellow, bonus tokens cyan.
    """
    from rich.console import Console

    from blockdraft.decoding import AdaptiveProposals, prompt_ids, round_costs
    from blockdraft.decoding import generate as decode
    from blockdraft.drafters import load_drafter
    from blockdraft.targets import load_target

    if compare and drafter is None:
        raise typer.BadParameter("there is nothing to compare without --drafter", param_hint="--compare")
    if compare and rule is not None:
        raise typer.BadParameter("it runs the rules token and block; leave --rule out", param_hint="--compare")
    if num_proposals is not None and drafter is None:
        raise typer.BadParameter("nothing is proposed without --drafter", param_hint="--num-proposals")
    asked = as_num_proposals(num_proposals)
    model = load_target(target, device=device, dtype=precision(dtype))
    small = None if drafter is None else load_drafter(drafter, model)
    rules = ["token", "block"] if compare else [str(rule or RuleName.block)]
    console = Console(highlight=False, soft_wrap=True)
    results = {}
    costs: RoundCosts | None = None
    if small is not None and asked is not None:
        read, last = prompt_ids(model, prompt, raw=raw), cast("Rule", rules[-1])
        settings: dict[str, Any] = {"rule": last, "temperature": temperature, "draft_temperature": draft_temperature}
        if asked == "adaptive":
            costs = round_costs(model, small, [read], **settings)
        else:
            best = _best_number(model, small, str(drafter), read, **settings) if asked == "auto" else asked
            small = small.with_proposals(best)
    for name in rules:
        stream = Stream(model, console, max_new_tokens, silent=as_json)
        out = decode(
            model, small, prompt, raw=raw, rule=cast("Rule", name), temperature=temperature, top_k=top_k, top_p=top_p,
            draft_temperature=draft_temperature, max_new_tokens=max_new_tokens, seed=seed, on_round=stream.show,
            num_proposals=None if costs is None else AdaptiveProposals(costs),
        )  # fmt: skip
        number = 0 if small is None else small.config.num_proposals
        said = "no drafter" if small is None else f"{name}, {'up to ' if costs else ''}{number} proposals"
        stream.close(out, said)
        results[name] = generation_facts(out) | {"num_proposals": number}
    if as_json:
        print_json(results)


def _best_number(
    target: "Target",
    drafter: "Drafter",
    name: str,
    prompt: list[int],
    rule: "Rule",
    temperature: float | None,
    draft_temperature: float | None,
) -> int:
    """Choose the number of proposals for this prompt; of a shipped drafter, the lengths are those of its card."""
    from blockdraft.decoding import choose_num_proposals
    from blockdraft.drafters import find_drafter
    from blockdraft.evaluation.candidates import shipped_record

    record = shipped_record(find_drafter(name))
    known = None if record is None or record.measured is None else record.measured.lengths_by_proposals.get(rule)
    usual = temperature in (None, 1.0) and draft_temperature in (None, 1.0)  # what the card was measured at
    choice = choose_num_proposals(
        target, drafter, [prompt], rule=rule, temperature=temperature, draft_temperature=draft_temperature,
        lengths=known if usual else None,
    )  # fmt: skip
    return choice.num_proposals


class Stream:
    """Prints rounds as they come, up to the budget, and a closing line."""

    def __init__(self, target: "Target", console: "Console", max_new_tokens: int, *, silent: bool = False) -> None:
        self.target, self.console, self.max_new_tokens, self.silent = target, console, max_new_tokens, silent
        self.tokens: list[int] = []
        self.shown = 0

    def show(self, record: "Round") -> None:
        """Print one round: its accepted tokens, then the token that the target added."""
        whole = record.accepted == len(record.drafted)
        last = "target" if not record.drafted else "bonus" if whole else "correction"
        kinds = ["accepted"] * record.accepted + ([] if record.next_token is None else [last])
        for token, kind in zip(record.tokens, kinds, strict=True):
            if len(self.tokens) < self.max_new_tokens:
                self._print(token, kind)

    def close(self, out: "Generation", label: str) -> None:
        """Print the acceptance length and the speed."""
        if self.silent:
            return
        num, speed = len(out.tokens), len(out.tokens) / out.seconds
        line = f"\n\n[{label}] {num} tokens, {out.acceptance_length:.2f} per verification, {speed:.1f} tokens/s"
        self.console.print(line, style="dim", markup=False)

    def _print(self, token: int, kind: str) -> None:
        """Print the text that this token completes; bytes of an unfinished character wait for the next one."""
        from rich.text import Text

        self.tokens.append(token)
        text = "" if self.silent else self.target.decode(self.tokens)
        if self.silent or text.endswith("�"):
            return
        self.console.print(Text(text[self.shown :], style=TOKEN_STYLES[kind]), end="")
        self.shown = len(text)


def generation_facts(out: "Generation") -> dict[str, Any]:
    """Return a generation as plain values."""
    return asdict(out) | {"acceptance_length": out.acceptance_length, "seconds": out.seconds}
