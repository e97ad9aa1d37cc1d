"""The steps of `make verify-gpu`, and how one is run: in a process of its own, with a deadline, ended with its family.

    this process                       the step's process
      writes TOLD_AT, MARK  -------->    runs the generator, adds a line to the file TOLD_AT for all that it yields,
      waits until the deadline           and one when it has ended or raised
      reads the file

What the step starts inherits the mark in its environment. So its family is found by that also where parents have ended
before their children, as those of host agents do, and what a step leaves behind is a failure of the step.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks import report
from benchmarks.faults.checks import MARK, marked, marked_environment, orphans
from benchmarks.figures import Figure
from benchmarks.processes import end
from benchmarks.verify import checks, measured
from meshbook import shutdown
from meshbook.monarch.config import configure

TOLD_AT = "MESHBOOK_VERIFY_TOLD"
LEASE_S = "5"  # agents whose step is killed end by themselves after so long, should we be killed too
GONE_WITHIN_S = 10.0  # after a step has ended, until what it has started must be gone
NOTE_LENGTH = 300
ROOT = Path(__file__).resolve().parents[2]


class Step(NamedTuple):
    """``what`` is the row's text; ``run`` yields words and figures for a device, and raises when it fails."""

    name: str
    what: str
    run: Callable[[str], Iterable[str | Figure]]
    limit_s: float = 75.0
    needs_cuda: bool = False


STEPS = (
    Step("form", "meshes of one rank and of two form", checks.form, limit_s=120),
    Step("one", "collectives of one rank", checks.collectives_of_one),
    Step("two", "collectives of two ranks on one device", checks.collectives_of_two),
    Step("exchange", "two ranks send each other large tensors", checks.exchanged),
    Step("freed", "all_reduce is freed after another rank raised", checks.freed_from_collectives),
    Step("item", "`.item()` behind a failed rank is freed", checks.freed_from_item),
    Step("kernel", "a kernel that loops behind a failed rank", checks.kernel_behind_failure, limit_s=90),
    Step("interrupt", "all_reduce is interrupted", checks.interrupted),
    Step("kill", "a rank is killed, and healed", checks.killed_and_healed),
    Step("memory", "out of memory", checks.out_of_memory),
    Step("ddp", "DDP trains as one process", checks.trained("ddp", own_rows=True)),
    Step("fsdp", "FSDP2 (fully_shard) trains as one process", checks.trained("fsdp", own_rows=True)),
    Step("tp", "tensor parallel (parallelize_module) trains", checks.trained("in_parts", own_rows=False)),
    Step("tensors", "mesh tensors train as one process", checks.mesh_tensors, limit_s=90),
    Step("compile", "recorded steps (meshbook.compile) train", checks.recorded_steps),
    Step("graphs", "a CUDA graph beside recorded steps", checks.graphs_beside_recorded_steps, needs_cuda=True),
    Step("calls", "figures: calls", measured.calls),
    Step("collectives", "figures: collectives", measured.collectives),
    Step("payloads", "figures: payloads", measured.payloads),
    Step("steps", "figures: a step of mesh tensors beside DDP", measured.steps_beside_ddp, limit_s=90),
)


class Outcome(NamedTuple):
    """What came of a step; each figure has the columns of `benchmarks.report.HEAD`."""

    result: Literal["passed", "failed", "hung", "not run"]
    seconds: float
    note: str
    figures: tuple[tuple[str, ...], ...] = ()

    @property
    def is_bad(self) -> bool:
        """Whether the command has to end with an error for it."""
        return self.result in ("failed", "hung")


def run_all(
    chosen: Sequence[str],
    device: str,
    within_s: float,
    logs: Path,
    on_outcome: Callable[[Step, Outcome], None],
    patience: float = 1,
) -> None:
    """Run the steps that were chosen, each once; tells of every step, also of those that were not run.

    patience: all limits but ``within_s`` are multiplied by it.
    """
    deadline = time.monotonic() + within_s
    for step in STEPS:
        if step.name not in chosen:
            outcome = Outcome("not run", 0, "not asked for")
        elif step.needs_cuda and device != "cuda":
            outcome = Outcome("not run", 0, "needs CUDA")
        elif (left_s := deadline - time.monotonic()) < 10:
            outcome = Outcome("not run", 0, f"the {within_s:.0f} s of the command were over")
        else:
            command = [sys.executable, "-m", "benchmarks.verify", "--step", step.name, "--device", device]
            limit_s = min(step.limit_s * patience, left_s)
            outcome = run_program(command, limit_s, logs / step.name, {checks.PATIENCE_AT: str(patience)})
        on_outcome(step, outcome)


def run_program(command: Sequence[str], limit_s: float, files: Path, variables: Mapping[str, str] = {}) -> Outcome:
    """Run a step's program and return what came of it; its whole family is gone then.

    limit_s: the program is ended after so long. files: what it told and printed goes to this path, with suffixes.
    variables: more of its environment.
    """
    told_at = files.with_suffix(".told")
    told_at.write_text("")
    environment = {"MESHBOOK_LEASE_S": LEASE_S, **marked_environment(), **variables, TOLD_AT: str(told_at)}
    mark = environment[MARK]
    begun = time.monotonic()
    with open(files.with_suffix(".log"), "wb") as log:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            status: int | None = child.wait(limit_s)
            left = len(orphans(mark, GONE_WITHIN_S))
        except subprocess.TimeoutExpired:
            status, left = None, 0
        finally:  # also when we are interrupted
            _end_family(mark)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs keeps even what is killed
                child.wait(5)
    took_s = time.monotonic() - begun
    lines = [json.loads(line) for line in told_at.read_text().splitlines() if line.endswith("}")]
    figures = tuple(tuple(line["figure"]) for line in lines if "figure" in line)
    return _outcome(status, left, limit_s, lines, files.with_suffix(".log"))._replace(seconds=took_s, figures=figures)


def _outcome(status: int | None, left: int, limit_s: float, lines: Sequence[Mapping[str, str]], log: Path) -> Outcome:
    """Judge by how the process ended, and by what it told. status: None where its time was over."""
    notes = [line["note"] for line in lines if "note" in line]
    raised = [line["error"] for line in lines if "error" in line]
    if status is None:
        where = raised or ([f"the last that it told: {notes[-1]}"] if notes else [])
        return Outcome("hung", 0, _short("; ".join([f"hung after {limit_s:.0f} s", *where])))
    if raised:
        return Outcome("failed", 0, _short("; ".join([*raised, *notes])))
    if status or not any("ended" in line for line in lines):
        said = log.read_text(errors="replace").strip().splitlines()
        how = f"ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
        return Outcome("failed", 0, _short("; ".join([how, *notes, *said[-1:]])))
    if left:
        return Outcome("failed", 0, _short("; ".join([f"left {left} processes behind", *notes])))
    return Outcome("passed", 0, _short("; ".join(notes)))


def _end_family(mark: str) -> None:
    """End what the step has started, and what that starts meanwhile; at most a few seconds."""
    for _ in range(3):
        if not (pids := marked(mark)):
            return
        end(pids, grace_s=1.0)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= NOTE_LENGTH else text[: NOTE_LENGTH - 3] + "..."


# ---- in the step's process -----------------------------------------------------------------------------------------


def run_here(name: str, device: str) -> int:
    """Run one step in this process and tell of it: in the file that TOLD_AT names, else on stdout."""
    (step,) = (step for step in STEPS if step.name == name)
    limit = f"{60 * checks.PATIENCE:.0f}s"
    configure(host_spawn_ready_timeout=limit, mesh_proc_spawn_max_idle=limit)
    faulthandler.register(signal.SIGTERM, chain=True)  # a step that hangs is ended by it: its stacks are in the log
    told_at = os.environ.get(TOLD_AT)
    with open(told_at, "a", buffering=1) if told_at else contextlib.nullcontext(sys.stdout) as told:
        try:
            for line in _told_by(step.run(device)):
                print(line, file=told, flush=True)
            shutdown()
        except BaseException as error:
            traceback.print_exc()
            first = (str(error).splitlines() or [""])[0]
            print(json.dumps({"error": f"{type(error).__name__}: {first}"}), file=told, flush=True)
            shutdown()
            return 1
        print(json.dumps({"ended": "well"}), file=told, flush=True)
    return 0


def _told_by(found: Iterable[str | Figure]) -> Iterator[str]:
    for each in found:
        yield json.dumps({"note": each} if isinstance(each, str) else {"figure": report.cells(each)})
