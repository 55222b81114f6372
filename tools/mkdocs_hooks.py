"""Hooks of the documentation site: links that leave ``docs/``, formulas, and lists of pages.

Pages link to source files and to Markdown files elsewhere in the repository, where any viewer of the repository
follows them. The site has none of these files, so each one that is linked becomes a page below ``repository/``.
Formulas become MathML while the site is built: it needs no script and no network.
"""

import html
import os
import re
from pathlib import Path
from typing import Any

import latex2mathml.converter
from mkdocs.structure.files import File, InclusionLevel

FENCE = re.compile(r"(^```.*?^```[^\S\n]*$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?P<to>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".cff": "yaml"}


def on_config(config: Any) -> Any:
    """Replace patterns in the navigation by the pages that match, an index first."""
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page for every file outside of ``docs/`` that a page links to, directly or through another one."""
    root = Path(config.config_file_path).parent
    waiting = [root / "docs" / file.src_uri for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in linked_files(page.read_text(encoding="utf-8"), page):
            if target in seen or not target.is_file() or target.is_relative_to(root / "docs"):
                continue
            seen.add(target)
            content = target.read_text(encoding="utf-8")
            if target.suffix == ".md":
                waiting.append(target)
            else:
                content = f"# {target.name}\n\n```{LANGUAGES.get(target.suffix, 'text')}\n{content.rstrip()}\n```\n"
            uri = site_uri(target, root)
            files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links lead to the places that the files have on the site."""
    root, uri = Path(config.config_file_path).parent, page.file.src_uri
    origin = _origin(uri, root)

    def moved(match: re.Match[str]) -> str:
        target = _resolved(match["to"], origin)
        if target is None:
            return match[0]
        there = site_uri(target, root)
        if files.get_file_from_path(there) is None:
            return match[0]
        return f"]({os.path.relpath(there, Path(uri).parent)}{match['anchor'] or ''})"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else indented(LINK.sub(moved, part)) for part in parts)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Turn the formulas of a page into MathML, and those of its headings into plain text for the table of contents."""
    del config, files
    _plain_titles(page.toc)
    return FORMULA.sub(_mathml, content)


def indented(prose: str) -> str:
    """Return prose whose lists Python-Markdown understands: it wants four columns for what belongs to an item.

    Markdown elsewhere, and our formatter, take two or three. A displayed formula in an item becomes a paragraph.
    """
    prose = re.sub(r"^ {2,3}(?=\S)", "    ", prose, flags=re.MULTILINE)
    prose = re.sub(r"^( {4}.*\n)(?=(?:\d+\.|-) )", r"\1\n", prose, flags=re.MULTILINE)
    return re.sub(r"^( {4}\$\$.*?\$\$)[^\S\n]*$", r"\n\1\n", prose, flags=re.DOTALL | re.MULTILINE)


def linked_files(markdown: str, page: Path) -> list[Path]:
    """Return the files that a page links to, resolved against its own place."""
    prose = "".join(part for part in FENCE.split(markdown) if not part.startswith("```"))
    found = (_resolved(match["to"], page) for match in LINK.finditer(prose))
    return [target for target in found if target is not None]


def site_uri(target: Path, root: Path) -> str:
    """Return where a file of the repository lies among the sources of the site."""
    docs = root / "docs"
    if target.is_relative_to(docs):
        return target.relative_to(docs).as_posix()
    path = target.relative_to(root).as_posix()
    return f"repository/{path}" if target.suffix == ".md" else f"repository/{path}.md"


def _origin(uri: str, root: Path) -> Path:
    """Return the file of the repository that a page of the site was made from; the inverse of `site_uri`."""
    if not uri.startswith("repository/"):
        return root / "docs" / uri
    path = root / uri.removeprefix("repository/")
    return path if path.is_file() else path.with_suffix("")


def _resolved(to: str, page: Path) -> Path | None:
    if ":" in to or to.startswith("/"):
        return None
    return Path(os.path.normpath(page.parent / to))


def _expanded(nav: Any, docs: Path) -> Any:
    if isinstance(nav, list):
        return [_expanded(each, docs) for each in nav]
    if isinstance(nav, dict):
        return {title: _expanded(each, docs) for title, each in nav.items()}
    if "*" not in nav:
        return nav
    pages = sorted(docs.glob(nav), key=lambda page: (page.name != "README.md", page.name))
    return [page.relative_to(docs).as_posix() for page in pages]


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match["tag"] == "div" else "inline"
    tex = re.sub(r"\\mathbb (\w)", r"\\mathbb{\1}", html.unescape(match["tex"]).strip())  # it wants the braces
    return str(latex2mathml.converter.convert(tex, display=display))


def _plain_titles(items: Any) -> None:
    for item in items:
        item.title = re.sub(r"\\\((.*?)\\\)", r"\1", item.title)
        _plain_titles(item.children)
