"""Runs the suite of ``make test`` again and again, to find the tests that fail now and then.

    python tests/support/repeat.py RUNS [--beside LOOPS] [-- PYTEST'S ARGUMENTS]

With ``--beside 4`` four processes compute all the while, each in a session of its own, since the scheduler shares a
machine by sessions; they end when this does, however it ends. Each run says how long it took and which tests failed;
build/repeat keeps its output. The last lines say how often each test has failed; the exit code is 1 if one has.

    python tests/support/repeat.py 10 --beside 4
    python tests/support/repeat.py 20 -- -n 0 tests/runtime/calls/test_calls.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from suite_report import RESULTS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import busy_loops  # noqa: E402

LOGS = ROOT / "build" / "repeat"
END_S = 60.0  # how long an interrupted run may take to end by itself


class Run(NamedTuple):
    """What one run of the suite took, and how it ended."""

    wall_s: float
    cpu_s: float  # this counts the processes that the run has waited for, not those that outlived their parents
    counts: dict[str, int]
    failures: list[str]  # tests, and files that could not be read
    why_incomplete: str  # empty where pytest came to its end


def run_suite(arguments: Sequence[str], log: Path) -> Run:
    """Run ``make test`` once, in a session of its own. log: gets its output."""
    results = log.with_suffix(".json")
    results.unlink(missing_ok=True)
    command = ["make", "--no-print-directory", "-C", str(ROOT), "test", f"ARGS={shlex.join(arguments)}"]
    environment = {**os.environ, RESULTS: str(results)}
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)  # with what it has waited for, and without the loops
        except BaseException:
            _end(process)
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    told = json.loads(results.read_text()) if results.exists() else {"counts": {}, "failures": []}
    why = ""
    if not results.exists() or (process.returncode and not told["failures"]):
        why = f"make test ended with {process.returncode} and names no test that failed; see {log}"
    wall_s, cpu_s = time.monotonic() - began, usage.ru_utime + usage.ru_stime
    return Run(wall_s, cpu_s, told["counts"], told["failures"], why)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run as Ctrl-C does, so that its meshes end too; what does not obey is killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def repeat(runs: int, beside: int, arguments: Sequence[str]) -> int:
    """Run the suite so often and say how it went; returns the exit code."""
    LOGS.mkdir(parents=True, exist_ok=True)
    failed: Counter[str] = Counter()
    incomplete = 0
    with busy_loops(beside):
        for number in range(1, runs + 1):
            run = run_suite(arguments, LOGS / f"{number}.txt")
            counts = ", ".join(f"{run.counts.get(outcome, 0)} {outcome}" for outcome in ("passed", "failed", "skipped"))
            print(f"run {number} of {runs}: {run.wall_s:.0f} s, {run.cpu_s:.0f} s of CPU, {counts}", flush=True)
            for line in [f"failed: {name}" for name in run.failures] + [run.why_incomplete] * bool(run.why_incomplete):
                print(f"  {line}", flush=True)
            failed.update(run.failures)
            incomplete += bool(run.why_incomplete)
    for name, count in failed.most_common():
        print(f"failed in {count} of {runs}: {name}")
    if incomplete:
        print(f"did not come to an end: {incomplete} of {runs}")
    if not failed and not incomplete:
        print(f"no test failed in {runs} run{'s' * (runs != 1)}")
    return 1 if failed or incomplete else 0


def _count(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
    return int(text)


def _end_by_signal(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # so that the run and the loops are ended first


def main(arguments: Sequence[str]) -> int:
    """Read the command line and repeat; returns the exit code."""
    ours, separator, pytests = list(arguments), "--", []
    if separator in ours:
        at = ours.index(separator)
        ours, pytests = ours[:at], ours[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="repeat.py", usage="repeat.py RUNS [--beside LOOPS] [-- PYTEST'S ARGUMENTS]", allow_abbrev=False
    )
    parser.add_argument("runs", type=lambda text: _count(1, text), help="how often the suite runs")
    parser.add_argument("--beside", type=lambda text: _count(0, text), default=0, help="how many processes compute")
    options = parser.parse_args(ours)
    signal.signal(signal.SIGTERM, _end_by_signal)
    try:
        return repeat(options.runs, options.beside, pytests)
    except KeyboardInterrupt:
        print("interrupted: the run and what computed beside it have ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
