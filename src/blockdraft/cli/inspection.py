"""What a data folder holds, for people and for programs."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from blockdraft.data import SamplingCheck, TextDataset
from blockdraft.targets import Target

QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


class DataSummary:
    """Holds counts, lengths, samples, and how the texts compare with the target's distribution."""

    def __init__(self, folder: Path, paths: TextDataset, target: Target, law: SamplingCheck | None) -> None:
        assert paths.manifest is not None
        self.folder, self.paths, self.manifest, self.target, self.law = folder, paths, paths.manifest, target, law

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain values."""
        manifest = self.manifest
        law = None if self.law is None else asdict(self.law) | {"plain": self.law.plain, "verdict": self.law.verdict}
        return {
            "about": manifest.about.model_dump(),
            "identity": manifest.identity.to_dict(),
            "complete": manifest.complete,
            "counts": manifest.totals.model_dump(),
            "lengths": self.lengths(),
            "law": law,
        }

    def lengths(self) -> dict[str, dict[str, int]]:
        """Return quantiles of prompt and response lengths."""
        columns = {"prompt": self.paths.prompt_lengths, "response": self.paths.response_lengths}
        return {
            name: {what: int(np.quantile(lengths, q, method="nearest")) for what, q in QUANTILES.items()}
            for name, lengths in columns.items()
        }

    def show(self, num_samples: int, seed: int) -> None:
        """Print it."""
        console = Console(highlight=False, markup=False, soft_wrap=True)
        self._samples(console, num_samples, seed)
        manifest, counts = self.manifest, self.manifest.totals
        state = "complete" if manifest.complete else f"{len(manifest.shards)} of {manifest.num_shards} shards"
        console.print(f"{self.folder}: {state}, every checksum right", style="bold")
        law = ", ".join(
            f"{name} {getattr(manifest.identity, name)}"
            for name in ("temperature", "top_k", "top_p", "max_new_tokens", "seed")
        )
        console.print(
            f"target {manifest.about.target} ({manifest.identity.target}), engine {manifest.identity.engine.name}"
        )
        console.print(f"said to be sampled with {law}")
        reasons = ", ".join(f"{num:,} {reason}" for reason, num in counts.finish_reasons.items())
        console.print(f"{counts.rows:,} rows ({reasons}), {counts.response_tokens:,} response tokens")
        for reason, num in counts.dropped.items():
            console.print(f"{num:,} conversations not answered to their end: {reason}")
        table = Table("tokens", *QUANTILES, box=None, pad_edge=False, header_style="bold")
        for name, values in self.lengths().items():
            table.add_row(name, *(str(value) for value in values.values()))
        console.print(table)
        if self.law is not None:
            self._law(console, self.law)

    def _law(self, console: Console, law: SamplingCheck) -> None:
        console.print(
            f"{law.num_tokens:,} tokens: mean log-probability {law.mean_log_prob:.4f}, minus the entropy "
            f"{-law.mean_entropy:.4f}, z = {law.z:+.1f}"
        )
        console.print(law.verdict, style="green" if law.plain else "bold red")

    def _samples(self, console: Console, num_samples: int, seed: int) -> None:
        chosen = np.random.default_rng(seed).permutation(len(self.paths))[:num_samples]
        for index in chosen.tolist():
            ids = self.paths[index].tolist()
            cut = int(self.paths.prompt_lengths[index])
            text = Text(self.target.decode(ids[:cut], skip_special_tokens=False), style="dim")
            text.append(self.target.decode(ids[cut:], skip_special_tokens=False), style="not dim green")
            console.print(text)
            console.print()
