"""`make verify-gpu`: how a step is run and judged, what the page keeps, and some steps over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processes import living
from benchmarks.verify import page
from benchmarks.verify.steps import ROOT, STEPS, Outcome, Step, run_all, run_program

pytestmark = pytest.mark.slow

TELL = "import json, os; told = open(os.environ['MESHBOOK_VERIFY_TOLD'], 'a', buffering=1); "
NOTE = TELL + "told.write(json.dumps({'note': 'half way'}) + '\\n'); "
CHILD = (
    "import subprocess, sys; child = subprocess.Popen("
    "[sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
)
HANG = "import time; time.sleep(600)"
ENDED = "told.write(json.dumps({'ended': 'well'}) + '\\n')"


def run_code(code: str, folder: Path, limit_s: float = 60) -> Outcome:
    return run_program([sys.executable, "-c", code], limit_s, folder / "step")


def test_a_step_that_hangs_is_ended_with_its_family(tmp_path: Path) -> None:
    """Its child has a session of its own, and another parent once it is ended: it is found all the same."""
    code = f"{NOTE}{CHILD}; told.write(json.dumps({{'note': f'child {{child.pid}}'}}) + '\\n'); {HANG}"
    for limit_s in (3, 12, 50):  # a busy machine takes long to start an interpreter
        outcome = run_code(code, tmp_path, limit_s)
        assert outcome.result == "hung" and outcome.is_bad and outcome.seconds >= limit_s
        if "child" in outcome.note:
            break
    assert outcome.note.startswith(f"hung after {limit_s} s; the last that it told: child ")
    assert not living([int(outcome.note.rpartition(" ")[2])])


def test_a_step_that_ignores_sigterm_is_ended_too(tmp_path: Path) -> None:
    code = f"{TELL}import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {HANG}"
    assert run_code(code, tmp_path, limit_s=3).note == "hung after 3 s"


@pytest.mark.parametrize(
    ("code", "note"),
    [
        (NOTE + "told.write(json.dumps({'error': 'CheckFailed: 3'}) + '\\n')", "CheckFailed: 3; half way"),
        (NOTE + "print('the log says'); exit(3)", "ended with exit code 3; half way; the log says"),
        (NOTE + "os.abort()", "ended by signal 6; half way"),
        (NOTE, "ended with exit code 0; half way"),
    ],
    ids=["raises", "exits", "crashes", "says nothing"],
)
def test_a_step_that_does_not_end_well_has_failed(code: str, note: str, tmp_path: Path) -> None:
    outcome = run_code(code, tmp_path)
    assert (outcome.result, outcome.note) == ("failed", note)


def test_a_step_that_leaves_a_process_has_failed(tmp_path: Path) -> None:
    outcome = run_code(f"{NOTE}{CHILD}; {ENDED}", tmp_path)
    assert (outcome.result, outcome.note) == ("failed", "left 1 processes behind; half way")


def test_what_a_step_told_is_kept(tmp_path: Path) -> None:
    code = NOTE + "told.write(json.dumps({'figure': ['call', '1 rank']}) + '\\n'); " + ENDED
    outcome = run_code(code, tmp_path)
    assert (outcome.result, outcome.note, outcome.figures) == ("passed", "half way", (("call", "1 rank"),))


def test_steps_that_cannot_run_say_why(tmp_path: Path) -> None:
    outcomes: dict[str, Outcome] = {}

    def note(step: Step, outcome: Outcome) -> None:
        outcomes[step.name] = outcome

    run_all(["graphs", "form"], "cpu", 5, tmp_path, note)
    assert list(outcomes) == [step.name for step in STEPS]
    assert {outcome.result for outcome in outcomes.values()} == {"not run"}
    assert [outcomes[name].note for name in ("graphs", "form", "two")] == [
        "needs CUDA",
        "the 5 s of the command were over",
        "not asked for",
    ]


def test_a_section_replaces_its_own_and_keeps_others(tmp_path: Path) -> None:
    file, figure = (
        tmp_path / "verified.md",
        ("call one", "2 ranks", "meshbook", "85 us", "99", "1-2", "5", "", "", "", ""),
    )
    passed = Outcome("passed", 3.14, "a | b < c", (figure,))
    page.write(file, "cpu", {"date": "today"}, {"form": passed}, "the command")
    page.write(file, "cuda", {"card": "one"}, {"form": Outcome("hung", 60, "hung after 60 s")}, "another")
    page.write(file, "cpu", {"date": "tomorrow"}, {"form": passed}, "the command")
    text = file.read_text()
    assert text.startswith(page.HEAD) and text.count("## On the CPU") == text.count("## On a GPU") == 1
    cpu, gpu = text.split("## On the CPU")[1].split("## On a GPU")
    assert "- date: tomorrow" in cpu and "today" not in text and f"1 passed, {len(STEPS) - 1} not run." in cpu
    assert "| meshes of one rank and of two form | passed | 3.1 | a \\| b &lt; c |" in cpu
    assert "| call one | 2 ranks | meshbook | 85 us | 99 | 1-2 | 5 |" in cpu
    assert "| collectives of one rank | not run |  | the command ended before |" in cpu
    assert "| meshes of one rank and of two form | HUNG | 60.0 | hung after 60 s |" in gpu and "- card: one" in gpu


def test_the_page_of_the_docs_begins_as_a_new_one_and_has_both_sections() -> None:
    text = (ROOT / "docs" / "verified.md").read_text()
    assert text.startswith(page.HEAD)
    assert [text.count(f"\n## {title}\n") for title in page.SECTIONS.values()] == [1, 1]


def run_command(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.verify", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.nightly
@pytest.mark.timeout(480)
def test_steps_run_over_gloo_and_are_written(tmp_path: Path) -> None:
    file = tmp_path / "verified.md"
    options = ["--patience", "4", "--write", str(file), "--logs", str(tmp_path)]
    done = run_command("--device", "cpu", "--only", "form,calls", *options, timeout_s=460)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert f"2 passed, {len(STEPS) - 2} not run" in done.stdout and "backend gloo" in done.stdout
    text = file.read_text()
    assert text.count("| passed |") == 2 and "| call all | 2 hosts x 1 rank | meshbook |" in text


def test_what_cannot_run_is_refused_in_a_line() -> None:
    done = run_command("--device", "cpu", "--only", "form,none")
    assert done.returncode == 2 and done.stderr.startswith("no step is called none; there are form, ")
    from meshbook.system.devices import count_cuda_devices

    if not count_cuda_devices():
        done = run_command("--only", "form")
        assert done.returncode == 2 and done.stderr.startswith("There is no CUDA device here. ")
