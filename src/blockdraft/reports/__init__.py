"""Report evaluations: the paper's tables and figures, and a page to read them and to step through blocks.

It needs the extra ``reports`` (jinja2 and matplotlib); without it, importing this package says how to install it.
"""

from blockdraft.errors import BlockdraftError


class MissingExtraError(BlockdraftError, ImportError):
    """Says which package is missing, and the command that installs it."""


try:
    from blockdraft.reports.comparison import Comparison, read_evaluations
    from blockdraft.reports.page import Headline, ReportFiles, headlines, write_report
    from blockdraft.reports.paper_tables import tables
    from blockdraft.reports.table import Table
except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package not in ("jinja2", "matplotlib"):
        raise
    message = f"reports need the package {package}, which is not installed: pip install 'blockdraft[reports]'"
    raise MissingExtraError(message) from None

__all__ = [
    "Comparison",
    "Headline",
    "MissingExtraError",
    "ReportFiles",
    "Table",
    "headlines",
    "read_evaluations",
    "tables",
    "write_report",
]
