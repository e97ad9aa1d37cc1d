"""What salloc, srun and tasks say is read as why a host ended; the lines are those of Slurm 22.05."""

from __future__ import annotations

import pytest

from meshbook.launchers.engines.slurm_jobs import StepLog

STARTED = """salloc: Granted job allocation 12
meshbook: job 12
srun: cluster configuration lacks support for cpu binding
0: meshbook: on n1
1: meshbook: on n2
"""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", None),
        ("srun: error: n2: task 1: Killed\n", "its agent on n2 ended (killed)"),
        (
            "srun: error: n[1-2]: tasks 0-1: Exited with exit code 1\n",
            "its agent on n2 ended (exited with exit code 1)",
        ),
        ("1: ImportError: no\nsrun: error: n2: task 1: Exited with exit code 1\n", "exit code 1): ImportError: no"),
        ("srun: error: n2: task 1: Out Of Memory\n", "its agent on n2 ended (out of memory)"),
        ("srun: error: Node failure on n2\n", "node n2 has failed, as Slurm says"),
        ("srun: error: Node failure on n1\nsrun: error: n1: task 0: Killed\n", None),
        (
            "0: slurmstepd-n1: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
            "srun: error: n2: task 1: Terminated\nmeshbook: srun ended 143\n",
            "Slurm has cancelled job 12: time limit",
        ),
        (
            "0: slurmstepd-n1: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***\n"
            "srun: error: n2: task 1: Terminated\nmeshbook: srun ended 143\n",
            "Slurm has cancelled job 12: preemption",
        ),
        ("meshbook: srun ended 137\n", "srun ended (killed by SIGKILL"),
    ],
)
def test_why_a_task_ended(more: str, said: str | None) -> None:
    log = StepLog.read(STARTED + more)
    assert log.job == "12" and log.owned and log.is_granted and log.nodes == {0: "n1", 1: "n2"}
    why = log.why_ended(1, "n2", "salloc", None)
    assert why is None if said is None else why is not None and said in why


def test_a_job_in_the_queue_has_a_number_and_no_end() -> None:
    log = StepLog.read("salloc: Pending job allocation 8\nsalloc: job 8 queued and waiting for resources\n")
    assert log.job == "8" and not log.is_granted and log.why_ended(0, "", "salloc", None) is None


def test_a_refusal_is_told_in_the_words_of_slurm() -> None:
    log = StepLog.read("salloc: error: Job submit/allocate failed: Invalid partition name specified\n")
    assert log.why_ended(0, "", "salloc", 1) == "salloc: Job submit/allocate failed: Invalid partition name specified"
