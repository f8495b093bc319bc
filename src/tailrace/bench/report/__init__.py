"""Reports: of one run, and of whole comparisons; the verdict comes first in each."""

from __future__ import annotations

from tailrace.bench.report.comparison_report import ReportFiles, write_reports
from tailrace.bench.report.run_report import require_report, write_report

__all__ = ["ReportFiles", "require_report", "write_report", "write_reports"]
