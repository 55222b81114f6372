"""Every Python block in the README and the guides runs as it stands."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("code", BLOCKS)
def test_block_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(code, "<documentation>", "exec"), {"__name__": "__main__"})


def test_there_are_blocks_to_run():
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_no_placeholder_is_left(page):
    assert not re.search(r"@@|TODO|TBD|XXX", page.read_text())


def test_the_parts_are_attributes_of_the_package():
    import blockdraft

    assert blockdraft.losses.objective("bv").name == "bv"
    assert callable(blockdraft.verification.verify)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = blockdraft.nothing
