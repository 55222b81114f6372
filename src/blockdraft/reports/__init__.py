"""Reports: the paper's tables and figures from evaluations, and a page to read them and to step through blocks."""

from blockdraft.reports.merging import Comparison, read_evaluations
from blockdraft.reports.paper_tables import tables
from blockdraft.reports.table import Table
from blockdraft.reports.writing import ReportFiles, write_report

__all__ = ["Comparison", "ReportFiles", "Table", "read_evaluations", "tables", "write_report"]
