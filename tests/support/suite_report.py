"""What a run of the suite says of itself: the files that it spends its time on, and, for who asks, its outcomes.

pyproject.toml loads this plugin of pytest. At the end of a run of more than `WHOLE` files it names the `DEAREST` ones,
with the seconds of their tests and of what these set up and take down, added over all workers of xdist. With

    MESHBOOK_TESTS_RERUN_LOG=FILE   a line is appended for each test that needed another try, with what it failed by
    MESHBOOK_TESTS_RESULTS=FILE     outcomes and failures are written there as JSON, when the run is over
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter, defaultdict
from pathlib import Path

import pytest

WHOLE, DEAREST, SAID_CHARS = 20, 20, 300
RERUN_LOG, RESULTS = "MESHBOOK_TESTS_RERUN_LOG", "MESHBOOK_TESTS_RESULTS"


class SuiteReport:
    """Adds up what is reported to the process that began the run."""

    def __init__(self) -> None:
        # Taken out of the environment, else runs of pytest that tests begin would write there as well.
        self._rerun_log, self._results = (os.environ.pop(name, "") for name in (RERUN_LOG, RESULTS))
        self._seconds: Counter[str] = Counter()
        self._tests: defaultdict[str, set[str]] = defaultdict(set)
        self._outcomes: dict[str, str] = {}
        """What became of each test: that it failed outweighs that its other phases passed."""
        self._reruns: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        self._tests[file].add(report.nodeid)
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]  # pytest-rerunfailures's own
            self._reruns.append(f"{report.nodeid} (Python {platform.python_version()}): {first_error(report)}")
        elif report.failed:
            self._outcomes[report.nodeid] = "failed"
        elif report.when == "call" or report.skipped:
            self._outcomes.setdefault(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._outcomes[report.nodeid] = report.outcome

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self._reruns and self._rerun_log:
            with Path(self._rerun_log).open("a") as file:
                file.writelines(f"{line}\n" for line in self._reruns)
        if self._results:
            failures = sorted(name for name, outcome in self._outcomes.items() if outcome == "failed")
            counts = Counter(self._outcomes.values())
            Path(self._results).write_text(json.dumps({"counts": counts, "failures": failures}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._seconds) <= WHOLE:
            return
        total_s = sum(self._seconds.values())
        title = f"the dearest {DEAREST} of {len(self._seconds)} files, which took {total_s:.0f} s"
        terminalreporter.write_sep("=", title)
        for file, seconds in self._seconds.most_common(DEAREST):
            count = len(self._tests[file])
            terminalreporter.write_line(f"{seconds:6.1f} s  {file} ({count} test{'s' * (count != 1)})")


def first_error(report: pytest.TestReport) -> str:
    """The first line of what a test failed by."""
    lines = [line.removeprefix("E").strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return lines[0][:SAID_CHARS] if lines else "it said nothing"


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers report to the process that started them
        config.pluginmanager.register(SuiteReport(), "meshbook-suite-report")
