"""docs/verified.md: a section for each kind of device, which a run on that kind replaces."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks import machine, report
from benchmarks.faults.document import replace_block
from benchmarks.verify.steps import ROOT, STEPS, Outcome

HEAD = """# Verified on

What was run on which device, by one command that ends within ten minutes. No other page promises more of GPUs.

    make verify-gpu                                            on a machine with a CUDA device; writes this page
    make verify-gpu ARGS="--device cpu"                        the same steps over gloo, on any machine
    make verify-gpu ARGS="--only form,item --write some.md"    some steps, into a page of their own

Each section is written by a run on such a device, and replaces the section before. Two ranks share the first card and
talk over sockets. No step covers several cards, several machines with GPUs, NVLink, InfiniBand, or MIG: none of these
was ever run.
"""
SECTIONS = {"cuda": "On a GPU", "cpu": "On the CPU, over gloo"}
FIGURES = 7  # so many columns of `benchmarks.report.HEAD` are shown: those that need no floor
UNKNOWN = "unknown"


def write(page: Path, device: str, facts: Mapping[str, str], outcomes: Mapping[str, Outcome], command: str) -> None:
    """Put what is known into the device's section; steps without an outcome are told as such. Others' sections stay."""
    if not page.exists():
        page.write_text(HEAD)
    replace_block(page, device, section(device, facts, outcomes, command))


def section(device: str, facts: Mapping[str, str], outcomes: Mapping[str, Outcome], command: str) -> str:
    """Return the section of one run."""
    known = {step.name: outcomes.get(step.name, NOT_YET) for step in STEPS}
    lines = [f"## {SECTIONS[device]}", "", f"By `{command}`.", ""]
    lines += [f"- {what}: {fact}" for what, fact in facts.items()]
    lines += ["", f"{tally(known)}.", "", "| what | result | seconds | note |", "| --- | --- | --- | --- |"]
    lines += [_row((step.what, *cells(known[step.name]))) for step in STEPS]
    figures = dict.fromkeys(figure[:FIGURES] for outcome in known.values() for figure in outcome.figures)
    if figures:
        lines += ["", _row(report.HEAD[:FIGURES]), _row(["---"] * FIGURES), *map(_row, figures)]
    return "\n".join(lines) + "\n"


NOT_YET = Outcome("not run", 0, "the command ended before")


def cells(outcome: Outcome) -> tuple[str, str, str]:
    """Return the columns result, seconds and note."""
    bad = outcome.is_bad
    result = outcome.result.upper() if bad else outcome.result
    return result, "" if outcome.result == "not run" else f"{outcome.seconds:.1f}", outcome.note


def tally(outcomes: Mapping[str, Outcome]) -> str:
    """Return ``17 passed, 1 failed, 1 not run``."""
    results = [outcome.result for outcome in outcomes.values()]
    counts = {result: results.count(result) for result in ("passed", "failed", "hung", "not run")}
    return ", ".join(f"{count} {result}" for result, count in counts.items() if count) or "nothing was run"


def _row(columns: Sequence[str]) -> str:
    return "| " + " | ".join(column.replace("|", "\\|").replace("<", "&lt;") for column in columns) + " |"


# ---- what it was run on --------------------------------------------------------------------------------------------


def facts_of(device: str, commit: str) -> dict[str, str]:
    """Return what the section says of this machine. commit: where the files lie in no repository."""
    here = machine.describe()
    facts = {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), "commit": commit or _commit()}
    if device == "cuda":
        name, driver, memory = _asked_of_driver()
        facts |= {"card": f"{name}, {memory}", "driver": driver}
        facts["torch"] = f"{torch.__version__}, CUDA {torch.version.cuda}, NCCL {_nccl()}"
    else:
        facts["torch"] = str(torch.__version__)
    facts["machine"] = (
        f"{here.cores} cores ({here.model}), {here.memory_gb:.0f} GB, Python {here.python}, {here.system}"
    )
    return facts


def _asked_of_driver() -> tuple[str, str, str]:
    """Return the first card's name, the driver's version and the card's memory."""
    told = _said_by("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    columns = [column.strip() for column in told.partition("\n")[0].split(",")]
    return (columns[0], columns[1], columns[2]) if len(columns) == 3 else (UNKNOWN, UNKNOWN, "memory unknown")


def _nccl() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError, TypeError):
        return UNKNOWN


def _commit() -> str:
    commit = _said_by("git", "rev-parse", "--short", "HEAD")
    changed = _said_by("git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/verified.md")
    return (f"{commit}, with changes" if changed else commit) or f"{UNKNOWN}, no git here"


def _said_by(*command: str) -> str:
    """Return what a program prints; empty where it is missing, fails or takes long."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
