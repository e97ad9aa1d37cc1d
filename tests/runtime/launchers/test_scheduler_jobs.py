"""What schedulers say of this user's jobs is read; a scheduler that says nothing, or nonsense, is named in time.

The answers are as the manuals of PBS, Torque, LSF, Grid Engine and HTCondor describe them: these do not run here. The
programs that give them are real ones, on a path of the test's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from patience import wait_until

from meshbook.launchers.engines.own_jobs import JobSearch
from meshbook.launchers.engines.scheduler_jobs import (
    OwnJob,
    elapsed_seconds,
    read_condor,
    read_grid_engine,
    read_lsf,
    read_pbs,
    read_torque,
)


def moment(form: str, seconds_ago: float = 90) -> str:
    return time.strftime(form, time.localtime(time.time() - seconds_ago))


def told(jobs: list[OwnJob]) -> list[tuple[str, str, int, str, str]]:
    return [(job.number, job.state, job.hosts, job.where, job.end) for job in jobs]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:07", 7), ("12:03", 723), ("1:00:05", 3605), ("2-01:00:00", 176400), ("16038", 16038), ("INVALID", None)],
)
def test_times_of_schedulers(text: str, seconds: float | None) -> None:
    assert elapsed_seconds(text) == seconds


PBS = """{{
    "timestamp":1630683518,
    "pbs_version":"20.0.1",
    "pbs_server":"pbs",
    "Jobs":{{
        "157.pbs":{{
            "Job_Name":"batch-1.1630683000.25", "Job_Owner":"ada@login", "job_state":"R", "queue":"workq",
            "resources_used":{{"cpupercent":0, "cput":"00:00:00", "mem":"5008kb", "ncpus":1, "walltime":"00:01:17"}},
            "exec_host":"n12/0*8", "exec_vnode":"(n12:ncpus=8)", "stime":"Fri Aug 20 23:14:09 2021",
            "qtime":"Fri Aug 20 23:14:08 2021", "Variable_List":{{"PBS_O_HOME":"/home/ada", "PBS_O_QUEUE":"workq"}}
        }},
        "158.pbs":{{"Job_Name":"batch-2.16306830", "Job_Owner":"ada@login", "job_state":"H", "qtime":"{waits}"}},
        "159.pbs":{{"Job_Name":"batch-3.16306830", "Job_Owner":"ada@login", "job_state":"R", "stime":"{waits}"}},
        "160.pbs":{{"Job_Name":"batch-4.16306830", "Job_Owner":"ada@login", "job_state":"F", "qtime":"{waits}"}},
        "161.pbs":{{"Job_Name":2021, "Job_Owner":"ada@login", "job_state":"R", "stime":"{waits}"}},
        "162.pbs":{{"Job_Name":"batch-5", "Job_Owner":"ada@login", "job_state":"R", "stime":"{waits}"}}
    }}
}}"""


def test_jobs_of_pbs() -> None:
    jobs = read_pbs(PBS.format(waits=moment("%a %b %d %H:%M:%S %Y")))
    assert told(jobs) == [
        ("157.pbs", "running", 1, "n12", "qdel 157.pbs"),
        ("158.pbs", "held", 1, "", "qdel 158.pbs"),
        ("159.pbs", "running", 1, "", "qdel 159.pbs"),
    ]
    ages = [job.age_s for job in jobs]
    assert ages[0] == 77 and all(age is not None and 89 <= age < 150 for age in ages[1:])
    assert read_pbs('{"timestamp":1630683518, "pbs_version":"20.0.1", "pbs_server":"pbs"}') == []


TORQUE = """<Data><Job><Job_Id>21.server</Job_Id><Job_Name>parsl.batch-1.1</Job_Name><Job_Owner>ada@login</Job_Owner>
<resources_used><cput>00:00:00</cput><walltime>01:00:02</walltime></resources_used><job_state>R</job_state>
<exec_host>n1/0+n1/1+n2/0</exec_host><qtime>1415305310</qtime><start_time>1415305311</start_time></Job>
<Job><Job_Id>22.server</Job_Id><Job_Name>parsl.batch-112</Job_Name><Job_Owner>ada@login</Job_Owner>
<job_state>Q</job_state><qtime>{waits}</qtime></Job>
<Job><Job_Id>23.server</Job_Id><Job_Name>parsl.batch-2.1</Job_Name><job_state>C</job_state></Job>
<Job><Job_Id>24.server</Job_Id><Job_Name>parsl.blocks</Job_Name><job_state>R</job_state></Job></Data>"""


def test_jobs_of_torque() -> None:
    jobs = read_torque(TORQUE.format(waits=int(time.time()) - 90))
    assert told(jobs) == [
        ("21.server", "running", 2, "n1,n2", "qdel 21.server"),
        ("22.server", "pending", 1, "", "qdel 22.server"),
    ]
    assert jobs[0].age_s == 3602 and jobs[1].age_s is not None and 89 <= jobs[1].age_s < 150
    assert read_torque("\n") == []


LSF = """{
  "COMMAND":"bjobs",
  "JOBS":5,
  "RECORDS":[
    {"JOBID":"101", "STAT":"RUN", "JOB_NAME":"batch-1.1545341.5", "EXEC_HOST":"8*hostA", "RUN_TIME":"16038 second(s)",
     "PEND_TIME":"17"},
    {"JOBID":"102", "STAT":"PEND", "JOB_NAME":"batch-2.1545341.5", "EXEC_HOST":"", "RUN_TIME":"", "PEND_TIME":"17"},
    {"JOBID":"103", "STAT":"USUSP", "JOB_NAME":"batch-3.1545341.5", "EXEC_HOST":"hostB:hostB", "RUN_TIME":"00:00:05",
     "PEND_TIME":""},
    {"JOBID":"104", "STAT":"RUN", "JOB_NAME":"ls -l", "EXEC_HOST":"hostB", "RUN_TIME":"1 second(s)", "PEND_TIME":"0"},
    {"JOBID":"105", "ERROR":"Job <105> is not found"}
  ]
}"""


def test_jobs_of_lsf() -> None:
    jobs = read_lsf(LSF)
    assert told(jobs) == [
        ("101", "running", 1, "hostA", "bkill 101"),
        ("102", "pending", 1, "", "bkill 102"),
        ("103", "suspended", 1, "hostB", "bkill 103"),
    ]
    assert [job.age_s for job in jobs] == [16038, 17, None]
    assert read_lsf('{"COMMAND":"bjobs","JOBS":0,"RECORDS":[]}') == read_lsf("") == []


GRID_ENGINE = """<?xml version='1.0'?>
<job_info  xmlns:xsd="http://arc.liv.ac.uk/repos/darcs/sge/source/dist/util/resources/schemas/qstat/qstat.xsd">
  <queue_info>
    <job_list state="running">
      <JB_job_number>4</JB_job_number>
      <JAT_prio>0.55500</JAT_prio>
      <JB_name>batch-1.1732551234.56.submit</JB_name>
      <JB_owner>ada</JB_owner>
      <state>r</state>
      <JAT_start_time>{since}</JAT_start_time>
      <queue_name>all.q@node009.cluster</queue_name>
      <slots>1</slots>
    </job_list>
  </queue_info>
  <job_info>
    <job_list state="pending">
      <JB_job_number>5</JB_job_number>
      <JB_name>batch-2.1732551234.57.submit</JB_name>
      <state>Eqw</state>
      <JB_submission_time>{since}</JB_submission_time>
      <queue_name></queue_name>
      <slots>1</slots>
    </job_list>
    <job_list state="pending">
      <JB_job_number>6</JB_job_number>
      <JB_name>sleep</JB_name>
      <state>qw</state>
      <JB_submission_time>{since}</JB_submission_time>
      <queue_name></queue_name>
    </job_list>
  </job_info>
</job_info>"""


def test_jobs_of_grid_engine() -> None:
    jobs = read_grid_engine(GRID_ENGINE.format(since=moment("%Y-%m-%dT%H:%M:%S")))
    assert told(jobs) == [
        ("4", "running", 1, "node009.cluster", "qdel 4"),
        ("5", "pending (Eqw)", 1, "", "qdel 5"),
    ]
    assert all(job.age_s is not None and 89 <= job.age_s < 150 for job in jobs)
    assert read_grid_engine("<?xml version='1.0'?><job_info><queue_info/><job_info/></job_info>") == []


CONDOR = """[
{{ "ClusterId": 118907, "ProcId": 0, "JobStatus": 2, "QDate": 1732551234, "JobCurrentStartDate": {since},
   "RemoteHost": "slot1_1@node7.pool", "Out": "/home/ada/logs/ab12/parsl.batch-1.1732551234.5.stdout" }}
,
{{ "ClusterId": 118908, "ProcId": 0, "JobStatus": 5, "QDate": {since}, "RemoteHost": "slot1@gone",
   "Out": "/home/ada/logs/ab12/parsl.batch-2.1732551234.5.stdout" }}
,
{{ "ClusterId": 118909, "ProcId": 0, "JobStatus": 4, "QDate": {since},
   "Out": "/home/ada/logs/ab12/parsl.batch-3.1732551234.5.stdout" }}
,
{{ "ClusterId": 118910, "ProcId": 0, "JobStatus": 1, "QDate": {since}, "Out": "out.txt" }}
]"""


def test_jobs_of_htcondor() -> None:
    jobs = read_condor(CONDOR.format(since=int(time.time()) - 90))
    assert told(jobs) == [
        ("118907.0", "running", 1, "node7.pool", "condor_rm 118907.0"),
        ("118908.0", "held", 1, "", "condor_rm 118908.0"),
    ]
    assert all(job.age_s is not None and 89 <= job.age_s < 150 for job in jobs)
    assert read_condor("") == read_condor("[]") == []


# ---- the commands ---------------------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Make a program, beside which there is nothing of any engine."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("meshbook.launchers.engines.own_jobs._RAY_CURRENT", tmp_path / "none")
    (tmp_path / "squeue").write_text("#!/bin/sh\n")  # Slurm's own may be there
    (tmp_path / "squeue").chmod(0o755)

    def make(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return make


def test_which_scheduler_a_qstat_belongs_to(program: Callable[[str, str], None]) -> None:
    program("qstat", "echo 'of Slurm, which has one too'")
    assert JobSearch().results() == ([], [])
    program("qselect", '[ "$1 $2" = "-u $(id -un)" ] && echo 157.pbs && echo 158.pbs')
    pbs = PBS.format(waits=moment("%a %b %d %H:%M:%S %Y"))
    program("qstat", f"[ $1 = --version ] && echo pbs_version = 20.0.1 && exit\necho $* >&2\ncat <<'END'\n{pbs}\nEND")
    jobs, silent = JobSearch().results()
    assert [job.engine for job in jobs] == ["PBS"] * 3 and silent == []
    program(
        "qstat", f"[ $1 = --version ] && echo Version: 6.1.3 >&2 && exit\ncat <<'END'\n{TORQUE.format(waits=0)}\nEND"
    )
    jobs, silent = JobSearch().results()
    assert [job.engine for job in jobs] == ["Torque"] * 2 and silent == []
    program("qselect", "true")
    assert JobSearch().results() == ([], [])
    program("qconf", "")
    grid = GRID_ENGINE.format(since=moment("%Y-%m-%dT%H:%M:%S"))
    program("qstat", f'[ "$1 $3" = "-u -xml" ] || exit 1\ncat <<\'END\'\n{grid}\nEND')
    jobs, silent = JobSearch().results()
    assert [job.engine for job in jobs] == ["Grid Engine"] * 2 and silent == []


def test_jobs_that_ended_between_two_questions_are_left_out(program: Callable[[str, str], None]) -> None:
    program("qselect", "echo 157.pbs")
    version = "[ $1 = --version ] && echo pbs_version = 20.0.1 && exit"
    program("qstat", f"{version}\necho 'qstat: Unknown Job Id 157.pbs' >&2; exit 153")
    assert JobSearch().results() == ([], [])
    pbs = PBS.format(waits=moment("%a %b %d %H:%M:%S %Y"))
    program("qstat", f"{version}\necho 'qstat: 9.pbs Unknown Job Id' >&2\ncat <<'END'\n{pbs}\nEND\nexit 153")
    jobs, silent = JobSearch().results()
    assert len(jobs) == 3 and silent == []


def test_lsf_and_htcondor_are_asked_by_their_commands(program: Callable[[str, str], None]) -> None:
    program("bjobs", f"[ $1 = -o ] && [ $3 = -json ] || exit 1\ncat <<'END'\n{LSF}\nEND")
    condor = CONDOR.format(since=int(time.time()) - 90)
    program("condor_q", f'[ "$1 $2 $3" = "$(id -un) -json -attributes" ] || exit 1\ncat <<\'END\'\n{condor}\nEND')
    jobs, silent = JobSearch().results()
    assert [job.engine for job in jobs] == ["LSF"] * 3 + ["HTCondor"] * 2 and silent == []
    program("bjobs", "echo 'No unfinished job found' >&2; exit 255")
    program("condor_q", "")
    assert JobSearch().results() == ([], [])


def test_a_scheduler_that_fails_is_told_in_its_words(program: Callable[[str, str], None]) -> None:
    program("bjobs", "echo 'Failed in an LSF library call: LIM is down; try later' >&2; exit 255")
    program("condor_q", "exit 3")
    program("qselect", "echo 'Connection refused' >&2; echo 'qselect: cannot connect to server pbs' >&2; exit 111")
    program("qstat", "")
    _, silent = JobSearch().results()
    assert silent == [
        "PBS has not told its jobs: qselect failed: Connection refused; qselect: cannot connect to server pbs",
        "LSF has not told its jobs: bjobs failed: Failed in an LSF library call: LIM is down; try later",
        "HTCondor has not told its jobs: condor_q failed: exit code 3",
    ]


@pytest.mark.parametrize("answer", ["Welcome to the cluster", '{"JOBS": 1}', "[1]", '{"RECORDS": [[]]}'])
def test_what_is_no_answer_is_shown(program: Callable[[str, str], None], answer: str) -> None:
    for name in ("bjobs", "condor_q", "qstat", "qconf"):
        program(name, f"echo '{answer}'")
    jobs, silent = JobSearch().results()
    assert jobs == [] and [line.partition(" has")[0] for line in silent] == ["LSF", "Grid Engine", "HTCondor"]
    assert all(f'said what is not understood here: "{answer}"' in line for line in silent), silent


def test_bytes_that_are_no_text_and_programs_that_cannot_run(
    program: Callable[[str, str], None], tmp_path: Path
) -> None:
    program("bjobs", r"printf '\377\376\n'")
    (tmp_path / "condor_q").write_text("#!/no/such/shell\n")
    (tmp_path / "condor_q").chmod(0o755)
    _, (lsf, condor) = JobSearch().results()
    assert "bjobs has said what is not understood here" in lsf and "condor_q could not be run: No such file" in condor


def test_what_a_slow_command_has_started_ends_with_it(program: Callable[[str, str], None], tmp_path: Path) -> None:
    program("bjobs", f"sleep 600 & echo $! >{tmp_path}/child; wait")
    began = time.monotonic()
    search = JobSearch(deadline_s=1.5)
    child = tmp_path / "child"
    wait_until(lambda: child.exists() and child.read_text().strip(), timeout_s=10)
    jobs, silent = search.results()
    assert jobs == [] and len(silent) == 1 and silent[0].startswith("LSF has not told its jobs: ")
    assert time.monotonic() - began < 10
    wait_until(lambda: not psutil.pid_exists(int(child.read_text())) or is_zombie(int(child.read_text())))


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True
