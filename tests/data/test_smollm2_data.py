"""The data folder in `datasets/smollm2`: whole, sampled as BV loss assumes, and its README counts what is there."""

import re
from collections import Counter
from pathlib import Path

from blockdraft.data import open_dataset, read_manifest
from blockdraft.data.store import read_completions

FOLDER = Path(__file__).parents[2] / "datasets" / "smollm2"


def test_the_folder_is_whole_and_sampled_at_temperature_1_over_the_whole_vocabulary():
    manifest = read_manifest(FOLDER)
    assert manifest.complete
    assert manifest.about.target == "smollm2"
    assert (manifest.identity.temperature, manifest.identity.top_k, manifest.identity.top_p) == (1.0, 0, 1.0)
    texts = open_dataset(FOLDER)  # checks every checksum
    assert len(texts) == manifest.totals.rows == 8192
    assert int(texts.tokens.max()) < 49_152
    assert int(texts.response_lengths.max()) <= manifest.identity.max_new_tokens


def test_the_readme_counts_prompts_by_source_and_tokens():
    readme = (FOLDER / "README.md").read_text()
    listed = {name: int(num.replace(",", "")) for name, num in re.findall(r"\| `([\w.]+)` \| ([\d,]+) \|", readme)}
    found = Counter(row.id.rsplit("-", 1)[0] for row in read_completions(FOLDER))
    assert listed == found
    totals = read_manifest(FOLDER).totals
    reasons = totals.finish_reasons
    for number in (totals.prompt_tokens, totals.response_tokens, reasons["stop"], reasons["length"]):
        assert f"{number:,}" in readme
