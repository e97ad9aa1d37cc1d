"""``make guests GUESTS=DIR``: programs of others by torchrun and by ``%mesh run``, and docs/guests.md.

    python -m benchmarks.guests DIR                   all whose clones are in DIR; a clone that is missing is told
    python -m benchmarks.guests DIR --only nanoGPT    those whose names begin so; writes no page

Each runs three times in a fresh copy of its folder: by torchrun, then twice on one mesh that serves all guests. Nothing
of it has a network: all runs in a network namespace with a loopback alone, or where there is none by the variables with
which libraries stay offline.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from jupyter_core.utils import ensure_event_loop

from benchmarks import machine
from benchmarks.guests.programs import GUESTS, NO_GPU, Guest
from benchmarks.running_kernel import RunningKernel

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guests.md"
RANKS = 2
TIMEOUT_S = 600.0
TOLERANCE = 1e-6
"""The most by which two numbers that count as equal differ."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "offline"}
ALIKE = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "TOKENIZERS_PARALLELISM": "false"}
"""The variables that torchrun sets for its ranks, and those by which lines are seen at once and as plain text."""
ALONE = "MESHBOOK_GUESTS_ALONE"
HAS_GPUS = torch.cuda.device_count() >= RANKS
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
TORCHRUNS_OWN = re.compile(r"\[?[EIW]\d{4} |\*{5}|Setting OMP_NUM_THREADS|\s*$|NOTE: Redirects")
CHECK = "%%mesh\nimport torch; import torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x); x.item()"


class Run(NamedTuple):
    """One run of a guest."""

    lines: list[str]
    first_s: float
    """The time until its first line is seen."""
    took_s: float
    error: str
    """Why it failed; empty when it did not."""

    def numbers(self, pattern: str) -> list[float]:
        """Return the numbers that the guest has printed on any rank, sorted, equal ones once."""
        found = (match for line in self.lines for match in re.findall(pattern, line))
        return sorted({float(number) for number in found})


class Mesh:
    """A notebook with a mesh, in a kernel of its own."""

    def __init__(self) -> None:
        ensure_event_loop()
        self.kernel = RunningKernel(env={**os.environ, **OFFLINE, **ALIKE})
        self.kernel.wait_for_ready()
        self.run("%load_ext meshbook_extension")
        spawned = self.run(f"%mesh spawn gpus={RANKS}" + ("" if HAS_GPUS else " --device cpu"))
        assert not spawned.error, spawned.error

    def run(self, code: str) -> Run:
        """Run a cell to its end, whatever becomes of it."""
        began = time.perf_counter()
        request, first_s, text, error = self.kernel.execute(code, allow_stdin=False), 0.0, "", ""
        while True:
            try:
                message = self.kernel.client.get_iopub_msg(timeout=TIMEOUT_S)
            except queue.Empty:
                return Run(text.splitlines(), first_s, TIMEOUT_S, f"silent for {TIMEOUT_S:.0f} s")
            content = message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "stream":
                first_s = first_s or time.perf_counter() - began
                text += content["text"]
            elif message["msg_type"] == "error":
                error = f"{content['ename']}: {content['evalue']}"
                text += "\n" + "\n".join(content["traceback"])
            elif content.get("execution_state") == "idle":
                return Run(plain(text).splitlines(), first_s, time.perf_counter() - began, plain(error))

    def script(self, guest: Guest, folder: Path) -> Run:
        """Run a guest as a person does who has gone to its folder."""
        self.run(f"%cd -q {folder}")
        return self.run(f"%mesh run {guest.words}")


def by_torchrun(guest: Guest, folder: Path) -> Run:
    """Run a guest by torchrun."""
    command, environment = [*TORCHRUN, *shlex.split(guest.words)], {**os.environ, **OFFLINE, **ALIKE}
    began, first_s, lines = time.perf_counter(), 0.0, list[str]()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    limit = threading.Timer(TIMEOUT_S, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    for line in process.stdout:
        if not TORCHRUNS_OWN.match(line):
            first_s = first_s or time.perf_counter() - began
            lines.append(plain(line))
    code = process.wait()
    limit.cancel()
    took_s = time.perf_counter() - began
    raised = [line.strip() for line in lines if re.match(r"(?:\[rank\d\]: ?)?\w[\w.]*(?:Error|Exception)\b", line)]
    return Run(lines, first_s, took_s, (raised or [f"exit code {code}"])[0] if code else "")


def plain(text: str) -> str:
    """Return text without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def copied(guest: Guest, clone: Path) -> Generator[Path, None, None]:
    """Yield a fresh copy of the guest's folder for each run, with its data, changed for this machine."""
    with tempfile.TemporaryDirectory(prefix="meshbook-guest-") as parent:
        first = Path(parent, "0")
        shutil.copytree(clone / guest.folder, first, ignore=shutil.ignore_patterns(".git"))
        for path in first.glob(guest.changed):
            path.write_text(changed(guest, path.read_text())[0])
        guest.prepare(first)
        for number in range(1, 4):
            yield Path(shutil.copytree(first, Path(parent, str(number))))


def changed(guest: Guest, text: str) -> tuple[str, int]:
    """Return a file with the changes of a guest, and how many lines these are."""
    lines = text.splitlines(keepends=True)
    for pattern, replacement in (*(() if HAS_GPUS else NO_GPU), *guest.changes):
        lines = [re.sub(pattern, replacement, line) for line in lines]
    return "".join(lines), sum(a != b for a, b in zip(text.splitlines(keepends=True), lines, strict=True))


class Ran(NamedTuple):
    """What became of a guest. runs: by torchrun, by the mesh and by the mesh again; empty where it could not begin."""

    guest: Guest
    version: str
    changes: int
    runs: list[Run]
    why_not: str = ""
    mesh_after: str = ""
    """Why the mesh is of no use afterwards; empty when it is sound."""

    @property
    def is_fine(self) -> bool:
        is_whole = not self.why_not and not self.mesh_after and not any(run.error for run in self.runs)
        return is_whole and 0 <= self.same() <= TOLERANCE

    def same(self) -> float:
        """Return the largest difference of a number between torchrun and the mesh; -1: they cannot be compared."""
        theirs, *ours = [run.numbers(self.guest.losses) for run in self.runs]
        if not theirs or any(len(each) != len(theirs) for each in ours):
            return -1.0
        return max(abs(a - b) for each in ours for a, b in zip(theirs, each, strict=True))


def run_guest(guest: Guest, clones: Path, mesh: Mesh, logs: Path) -> Ran:
    """Run a guest three times."""
    clone = clones / guest.repository.partition("/")[2]
    if not (clone / guest.folder).is_dir():
        return Ran(guest, "", 0, [], "not there")
    told = subprocess.run(
        ["git", "-C", str(clone), "log", "-1", "--format=%h of %cs"], capture_output=True, text=True, check=False
    )
    version = told.stdout.strip() or "no commit known"
    try:
        version = ", ".join([version, *(f"{name} {metadata.version(name)}" for name in guest.needs)])
    except metadata.PackageNotFoundError as error:
        return Ran(guest, version, 0, [], f"{error.name} is not installed")
    files = [path for path in (clone / guest.folder).glob(guest.changed) if path.is_file()]
    changes = sum(changed(guest, path.read_text())[1] for path in files)
    folders = copied(guest, clone)
    runs = [by_torchrun(guest, next(folders)), mesh.script(guest, next(folders)), mesh.script(guest, next(folders))]
    folders.close()
    for run, name in zip(runs, ("torchrun", "mesh", "again"), strict=True):
        (logs / f"{re.sub(r'[^A-Za-z0-9]+', '-', guest.name)}.{name}.txt").write_text("\n".join(run.lines))
    return Ran(guest, version, changes, runs, mesh_after=mesh.run(CHECK).error)


def page(rans: list[Ran], network: str, load: float) -> str:
    """Return docs/guests.md."""
    fine = sum(ran.is_fine for ran in rans)
    lines = [
        "# Programs of others",
        "",
        "Programs of other projects that were written for torchrun: by torchrun, then twice by `%mesh run` on a mesh.",
        "Written by `make guests GUESTS=DIR`, where DIR has clones that you name; do not edit.",
        "",
        f"{fine} of {len(rans)} run on the mesh, once and again, with the numbers of torchrun, and leave it whole.",
        "",
        f"- date: {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        f"- machine: {machine.describe()}; others used {load:.0%} of it when the run began",
        f"- ranks: {RANKS}, on {'GPUs' if HAS_GPUS else 'the CPU over gloo'}; {network}",
        "",
        "| program | torchrun | mesh | again | numbers | largest difference | mesh after it |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for ran in rans:
        results = [result(run) for run in ran.runs] or [ran.why_not, "", ""]
        count = len(ran.runs[0].numbers(ran.guest.losses)) if ran.runs else 0
        same = ran.same() if ran.runs else -1
        told = f"{same:.0e}" if same > 0 else "none" if same == 0 else "not comparable" if ran.runs else ""
        after = (ran.mesh_after or "whole") if ran.runs else ""
        lines.append(row(ran.guest.name, *results, str(count or ""), told, after))
    lines += [
        "",
        "Numbers are losses, or other values that a program prints. Equal ones count once.",
        "",
        "## Seconds to the first line, and to the end",
        "",
        "| program | torchrun | mesh | again |",
        "| --- | --- | --- | --- |",
        *(
            row(ran.guest.name, *(f"{run.first_s:.2f}, {run.took_s:.1f}" for run in ran.runs))
            for ran in rans
            if ran.runs and not any(run.error for run in ran.runs)
        ),
        "",
        "The first run on the mesh imports the program's libraries; the next finds them imported.",
        "",
        "## What was run",
        "",
        "| program | clone | at | lines changed |",
        "| --- | --- | --- | --- |",
        *(row(ran.guest.name, ran.guest.repository, ran.version, str(ran.changes) if ran.runs else "") for ran in rans),
        "",
        "All three runs have the same changes. Most programs ask for a GPU for each rank. Where there is none,",
        "lines that name `cuda` or `nccl` name the CPU and gloo. Where a program prints no loss, a line does.",
        "Random data and weights get a seed.",
        "",
        *(f"- {ran.guest.name}: {ran.guest.note}" for ran in rans if ran.guest.note),
    ]
    if broken := [ran for ran in rans if ran.runs and any(run.error for run in ran.runs)]:
        lines += ["", "## What did not run", ""]
        for ran in broken:
            reasons = dict.fromkeys(run.error.partition("\n")[0] for run in ran.runs if run.error)
            lines += [f"- {ran.guest.name}: " + "; ".join(f"`{reason[:300]}`" for reason in reasons)]
    return "\n".join(lines) + "\n"


def result(run: Run) -> str:
    return "failed" if run.error else "ran"


def row(*columns: str) -> str:
    return "| " + " | ".join(column.replace("|", "\\|") for column in columns) + " |"


def alone(arguments: list[str]) -> str:
    """Go on in a network namespace with a loopback alone; returns what hides the network where that cannot be."""
    if told := os.environ.get(ALONE):
        return told
    enter = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    try:
        can = subprocess.run([*enter, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        can = False
    if not can:
        return "the network is hidden by variables alone"
    os.environ[ALONE] = "in a namespace without a network"
    return os.execvp(enter[0], [*enter, sys.executable, "-m", "benchmarks.guests", *arguments])


def main(arguments: list[str]) -> int:
    """Run all guests; returns 1 where torchrun runs one that the mesh does not, or not alike."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guests", description=__doc__)
    parser.add_argument("clones", type=Path, help="the folder with the clones")
    parser.add_argument("--only", default="", metavar="NAME", help="guests whose name begins so; no page is written")
    options = parser.parse_args(arguments)
    if not options.clones.is_dir():
        parser.error(f"there is no folder {options.clones}: name the one with your clones, GUESTS=DIR")
    network, logs, load = alone(arguments), Path(tempfile.mkdtemp(prefix="meshbook-guests-")), machine.others_load()
    mesh, rans = Mesh(), list[Ran]()
    try:
        for guest in (each for each in GUESTS if each.name.startswith(options.only)):
            ran = run_guest(guest, options.clones.resolve(), mesh, logs)
            rans.append(ran)
            shown = [ran.why_not, *(f"{result(run)} {run.first_s:.2f} s" for run in ran.runs)]
            print(f"{guest.name}: {', '.join(filter(None, shown))}", ran.same() if ran.runs else "", ran.mesh_after)
            for run in ran.runs:
                print(f"    {run.error}" if run.error else "", end="\n" if run.error else "", flush=True)
    finally:
        mesh.kernel.close()
    print(f"logs: {logs}")
    if not options.only:
        PAGE.write_text(page(rans, network, load))
    return 1 if any(ran.runs and not ran.runs[0].error and not ran.is_fine for ran in rans) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
