"""Jobs of ours that schedulers hold, as their own commands tell of this user's (`meshbook.launchers.engines.own_jobs`).

    Slurm          squeue -o                                  one line for each
    PBS, Torque    qselect -u, then qstat -f -F json, -x      JSON of PBS, XML of Torque
    LSF            bjobs -json                                JSON
    Grid Engine    qstat -xml                                 XML
    HTCondor       condor_q -json                             JSON

A job is ours by its name, which Parsl has made of that of its host (`meshbook.launchers.batch`). Three schedulers have
a qstat: only Grid Engine has qconf beside it, and only PBS and Torque have a qselect that lists jobs; what Slurm ships
under these names has neither.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple
from xml.etree import ElementTree

from meshbook.errors import SpawnError
from meshbook.launchers.engines.commands import answer_of, describe_failure
from meshbook.launchers.engines.slurm_allocation import JOB_NAME, NoClusterError, ask

_OF_BATCH = re.compile(r"batch-\d+\.[\d.]*(submit)?|parsl\.batch-\d+[\d.]*")
"""What Parsl calls the job of a host, as far as a scheduler keeps it; Grid Engine calls it like the submitted file."""
_OF_CONDOR = re.compile(r"(?:.*/)?(parsl\.batch-\d+[\d.]*)\.stdout")
"""Where the output of a job of HTCondor goes, which has no name."""


class OwnJob(NamedTuple):
    """number: what `MeshState.jobs` of its mesh has. end: the command that ends it."""

    engine: str
    number: str
    state: str
    age_s: float | None
    hosts: int
    where: str
    end: str


def elapsed_seconds(text: str) -> float | None:
    """A time of a scheduler, ``[DAYS-][[HOURS:]MINUTES:]SECONDS``; None where it is none."""
    days, _, rest = text.rpartition("-")
    try:
        seconds = 0
        for part in rest.split(":"):
            seconds = 60 * seconds + int(part)
        return float(seconds + 86400 * int(days or 0))
    except ValueError:
        return None


def _since(moment: float | None) -> float | None:
    return None if moment is None else max(0.0, time.time() - moment)


def _job(engine: str, number: str, state: str, age_s: float | None, nodes: Sequence[str], end: str) -> OwnJob:
    unique = list(dict.fromkeys(nodes))
    return OwnJob(engine, number, state, age_s, max(1, len(unique)), ",".join(unique), f"{end} {number}")


# ---- Slurm ----------------------------------------------------------------------------------------------------------


def of_slurm(deadline_s: float) -> list[OwnJob]:
    """Of salloc and sbatch. Raises: SpawnError."""
    words = ("squeue", "-h", "-u", str(os.getuid()), "-t", "PD,R,S", "-o", "%i|%T|%M|%D|%N|%j")
    try:
        told = ask(*words, timeout_s=deadline_s)
    except NoClusterError:
        return []
    jobs = []
    for line in told.splitlines():
        number, state, age, hosts, nodes, name = line.split("|", 5)
        if name == JOB_NAME or _OF_BATCH.fullmatch(name):
            job = OwnJob("Slurm", number, state.lower(), elapsed_seconds(age), int(hosts), nodes, f"scancel {number}")
            jobs.append(job)
    return jobs


# ---- PBS and Torque -------------------------------------------------------------------------------------------------

_PBS_STATES = {
    "Q": "pending",
    "R": "running",
    "H": "held",
    "W": "waiting",
    "S": "suspended",
    "E": "ending",
    "T": "moving",
}


def of_pbs(deadline_s: float) -> list[OwnJob]:
    """Raises: SpawnError."""
    ask = _asking("PBS", deadline_s)
    ids = ask("qselect", "-u", _user()).split()
    if not ids:
        return []
    if "pbs_version" in ask("qstat", "--version"):
        return _read(read_pbs, "qstat", ask("qstat", "-f", "-F", "json", *ids, missing="nknown Job"))
    return _read(read_torque, "qstat", ask("qstat", "-x", *ids, missing="nknown Job"))


def read_pbs(text: str) -> list[OwnJob]:
    """What ``qstat -f -F json`` of PBS says; empty for no jobs. Raises: KeyError, TypeError, ValueError."""
    jobs = []
    found = json.loads(text).get("Jobs") if text.strip() else None
    for number, told in (found or {}).items():
        state = _PBS_STATES.get(told["job_state"])
        if state is None or not _OF_BATCH.fullmatch(str(told["Job_Name"])):
            continue
        age_s = elapsed_seconds(str((told.get("resources_used") or {}).get("walltime", "")))
        if state != "running" or age_s is None:
            age_s = _since(_of_c(str(told.get("stime" if state == "running" else "qtime", ""))))
        jobs.append(_job("PBS", number, state, age_s, _nodes(str(told.get("exec_host", ""))), "qdel"))
    return jobs


def read_torque(text: str) -> list[OwnJob]:
    """What ``qstat -x`` of Torque says; empty for no jobs. Raises: ElementTree.ParseError, ValueError."""
    jobs = []
    for told in ElementTree.fromstring(text).iter("Job") if text.strip() else ():
        state = _PBS_STATES.get(told.findtext("job_state", ""))
        if state is None or not _OF_BATCH.fullmatch(told.findtext("Job_Name", "")):
            continue
        age_s = elapsed_seconds(told.findtext("resources_used/walltime", ""))
        if state != "running" or age_s is None:
            moment = told.findtext("start_time" if state == "running" else "qtime")
            age_s = _since(float(moment) if moment else None)
        jobs.append(
            _job("Torque", told.findtext("Job_Id", ""), state, age_s, _nodes(told.findtext("exec_host", "")), "qdel")
        )
    return jobs


def _of_c(text: str) -> float | None:
    """``Wed Apr 14 23:34:17 2021``, here, in seconds since 1970; None where it is none."""
    with contextlib.suppress(ValueError):
        return time.mktime(time.strptime(text, "%a %b %d %H:%M:%S %Y"))
    return None


def _nodes(exec_host: str) -> list[str]:
    """The nodes of ``n1/0*8+n2/0``."""
    return [part.partition("/")[0] for part in exec_host.split("+") if part]


# ---- LSF ------------------------------------------------------------------------------------------------------------

_LSF_STATES = {"PEND": "pending", "RUN": "running", "WAIT": "waiting", "UNKWN": "out of reach"}


def of_lsf(deadline_s: float) -> list[OwnJob]:
    """Raises: SpawnError."""
    fields = "jobid stat job_name exec_host run_time pend_time"
    said = _asking("LSF", deadline_s)("bjobs", "-o", fields, "-json", missing="No unfinished job found")
    return _read(read_lsf, "bjobs", said)


def read_lsf(text: str) -> list[OwnJob]:
    """What ``bjobs -json`` says; empty for no jobs. Raises: AttributeError, KeyError, TypeError, ValueError."""
    jobs = []
    for told in json.loads(text)["RECORDS"] if text.strip() else ():
        if "ERROR" in told or told["STAT"] in ("DONE", "EXIT", "ZOMBI") or not _OF_BATCH.fullmatch(told["JOB_NAME"]):
            continue
        state = _LSF_STATES.get(told["STAT"], "suspended")
        words = told.get("RUN_TIME" if state == "running" else "PEND_TIME", "").split()  # 16038 second(s), or 17
        nodes = [each.rpartition("*")[2] for each in told.get("EXEC_HOST", "").split(":") if each]  # 8*hostA
        age_s = elapsed_seconds(words[0]) if words else None
        jobs.append(_job("LSF", told["JOBID"], state, age_s, nodes, "bkill"))
    return jobs


# ---- Grid Engine ----------------------------------------------------------------------------------------------------


def of_grid_engine(deadline_s: float) -> list[OwnJob]:
    """Raises: SpawnError."""
    return _read(read_grid_engine, "qstat", _asking("Grid Engine", deadline_s)("qstat", "-u", _user(), "-xml"))


def read_grid_engine(text: str) -> list[OwnJob]:
    """What ``qstat -xml`` of Grid Engine says. Raises: ElementTree.ParseError, ValueError."""
    jobs = []
    for told in ElementTree.fromstring(text).iter("job_list"):
        if not _OF_BATCH.fullmatch(told.findtext("JB_name", "")):
            continue
        state, code = told.get("state", "pending"), told.findtext("state", "")
        moment = told.findtext("JAT_start_time") or told.findtext("JB_submission_time")
        age_s = _since(datetime.fromisoformat(moment).timestamp() if moment else None)
        if code not in ("r", "qw"):
            state = f"{state} ({code})"  # Eqw, hqw, t: what is with it
        nodes = [told.findtext("queue_name", "").rpartition("@")[2]]
        jobs.append(
            _job("Grid Engine", told.findtext("JB_job_number", ""), state, age_s, list(filter(None, nodes)), "qdel")
        )
    return jobs


# ---- HTCondor -------------------------------------------------------------------------------------------------------

_CONDOR_STATES = {1: "pending", 2: "running", 5: "held", 6: "running", 7: "suspended"}
"""Those that have ended stay in its queue, since Parsl asks for it."""


def of_condor(deadline_s: float) -> list[OwnJob]:
    """Raises: SpawnError."""
    fields = "ClusterId,ProcId,JobStatus,QDate,JobCurrentStartDate,RemoteHost,Out"
    return _read(
        read_condor, "condor_q", _asking("HTCondor", deadline_s)("condor_q", _user(), "-json", "-attributes", fields)
    )


def read_condor(text: str) -> list[OwnJob]:
    """What ``condor_q -json`` says; empty for no jobs. Raises: AttributeError, KeyError, TypeError, ValueError."""
    jobs = []
    for told in json.loads(text) if text.strip() else ():
        state = _CONDOR_STATES.get(told["JobStatus"])
        if state is None or not _OF_CONDOR.fullmatch(told.get("Out", "")):
            continue
        age_s = _since(told.get("JobCurrentStartDate" if state == "running" else "QDate"))
        node = told.get("RemoteHost", "").rpartition("@")[2] if state == "running" else ""
        number = f"{told['ClusterId']}.{told['ProcId']}"
        jobs.append(_job("HTCondor", number, state, age_s, [node] if node else [], "condor_rm"))
    return jobs


# ---- all of them ----------------------------------------------------------------------------------------------------


def _asking(engine: str, deadline_s: float) -> Callable[..., str]:
    """What asks commands of an engine, all within the time."""
    until = time.monotonic() + deadline_s

    def ask(*command: str, missing: str = "") -> str:
        """missing: how it says that there is no such job. Raises: SpawnError."""
        answer = answer_of(engine, *command, timeout_s=max(0.1, until - time.monotonic()))
        if answer.stdout.strip() or not answer.returncode or (missing and missing in answer.stderr):
            return answer.stdout  # of some that it has found, though others have ended meanwhile
        raise SpawnError(describe_failure(answer))

    return ask


def _read(read: Callable[[str], list[OwnJob]], program: str, text: str) -> list[OwnJob]:
    """Raises: SpawnError for what is no answer."""
    try:
        return read(text)
    except (AttributeError, KeyError, TypeError, ValueError, ElementTree.ParseError):
        said = " ".join(text.split())[:80]
        raise SpawnError(f'{program} has said what is not understood here: "{said}"') from None


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _has(*programs: str, but: str = "") -> bool:
    return all(map(shutil.which, programs)) and not (but and shutil.which(but))


SCHEDULERS_ASKED: Sequence[tuple[str, Callable[[], bool], Callable[[float], list[OwnJob]]]] = (
    ("Slurm", lambda: _has("squeue"), of_slurm),
    ("PBS", lambda: _has("qstat", "qselect", but="qconf"), of_pbs),
    ("LSF", lambda: _has("bjobs"), of_lsf),
    ("Grid Engine", lambda: _has("qstat", "qconf"), of_grid_engine),
    ("HTCondor", lambda: _has("condor_q"), of_condor),
)
"""What it is called, whether its commands are here, and what finds its jobs within so many seconds."""
