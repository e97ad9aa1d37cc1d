"""Allocations of Slurm, the clients that ask for them and start agents there, and the logs of these clients.

`meshbook.launchers.slurm` says how they stand together.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshbook.errors import SpawnError
from meshbook.launchers.agent_start import PYTHON_HINTS, address_reaching, open_log
from meshbook.launchers.engines.clients import END_S, Client, TaskLog
from meshbook.launchers.engines.commands import NO_CLUSTER, answer_of, describe_failure, program_of
from meshbook.system.processes import describe_shell_exit
from meshbook.wire.ticket import Ticket, elsewhere, encode_tickets

JOB_NAME = "meshbook"
ANSWER_S = 10.0
"""The time within which commands of Slurm have to answer."""
PIPE_BYTES = 1 << 20
"""The size of the pipe to a client, which holds the tickets of some 2,000 hosts."""
LOOK_S = 2.0
"""The time between two looks at the queue."""

_GUARD = """
(cat "$1" >/dev/null 2>&1; read -r _ _ _ parent _ </proc/self/stat; [ "$parent" = $$ ] && kill $$) &
export MESHBOOK_GUARD=$!
shift
exec "$@"
"""
"""The shell that becomes salloc: as long as that is in the queue it ends with us, who hold the other end of pipe $1."""

_JOB = re.compile(r"(?:salloc: (?:Pending|Granted) job allocation|meshbook: job) (\d+)")
_SALLOC = re.compile(r"(?:/\S*/)?salloc: ")
"""The beginning of its lines; complaints about its options begin with its path."""
_RUNS_IN = "meshbook: job "
_LABEL = re.compile(r"(\d+): (.*)")
_SRUN_ENDED = re.compile(r"meshbook: srun ended (\d+)")
_TASKS_ENDED = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.*)")
_NODE_FAILED = re.compile(r"srun: error: Node failure on (\S+)")
_CANCELLED = re.compile(r"\*\*\* (?:STEP|JOB) (\d+)\S* ON \S+ CANCELLED AT \S+(?: DUE TO (.*?))? \*\*\*")
"""The number of a step begins with that of its job."""
_IMPOSSIBLE = "Requested partition configuration not available now"
"""The text of salloc on a request that no node of the partition can ever meet; it waits all the same."""

_NOISE = re.compile(
    r"salloc: (Granted|Pending|Relinquishing|Nodes |Waiting for|job \d+ (queued|has been allocated))"
    r"|srun: (Job step aborted|Force Terminated|launch/|Terminating|forcing|cluster configuration lacks)"
    r"|srun: error: \S+: tasks? [\d,-]+: "
)

_HINTS = (
    *(
        (words, "Its allocation has no node for it, see sinfo")
        for words in ("node configuration is not available", "Hostlist is empty")
    ),
    *PYTHON_HINTS,
    *((words, "Its allocation has ended: spawn the mesh again.") for words in ("nvalid job", "already completing")),
)


@dataclass
class StepLog(TaskLog):
    """The log of salloc, srun and their tasks. ends: Slurm's words on the end of a task, by task."""

    job: str = ""
    owned: bool = False
    """Whether the job was asked for by the salloc that wrote this."""
    is_granted: bool = False
    is_given_back: bool = False
    ends: dict[int, str] = field(default_factory=dict)
    failed_nodes: set[str] = field(default_factory=set)
    srun_status: int | None = None
    cancelled: str = ""

    label = _LABEL
    hints = _HINTS

    def add_said(self, task: int | None, line: str) -> None:
        self.owned = self.owned or _SALLOC.match(line) is not None
        if match := _CANCELLED.search(line):
            why = f": {match[2].lower()}" if match[2] else ""
            self.cancelled = f"Slurm has cancelled job {match[1]}{why}"
        elif match := _SRUN_ENDED.match(line):
            self.srun_status = int(match[1])
        elif match := _NODE_FAILED.match(line):
            self.failed_nodes.add(match[1].rstrip(","))
        elif match := _TASKS_ENDED.match(line):
            self.ends.update(dict.fromkeys(_numbers(match[1]), match[2]))
        elif not _NOISE.match(line) and not line.startswith(_RUNS_IN):
            self.said[task].append(re.sub(r"^(salloc|srun|slurmstepd\S*): (error: |fatal: )?", r"\1: ", line))
        if match := _JOB.match(line):
            self.job = match[1]
        self.is_granted = self.is_granted or line.startswith(_RUNS_IN)
        self.is_given_back = self.is_given_back or "Relinquishing" in line

    def why_ended(self, task: int, node: str, client: str, status: int | None) -> str | None:
        """Return why there is no agent any more, or will be none; None while there may be.

        client: the program that writes this log. status: its exit status, as in `subprocess`; None while it runs.
        """
        where = f" on {node}" if node else ""
        if node in self.failed_nodes:
            return f"node {node} has failed, as Slurm says"
        if task in self.ends:
            return self.cancelled or self.with_words(f"its agent{where} ended ({self.ends[task].lower()})", task)
        if self.srun_status is not None or status is not None:
            ended = self.srun_status if self.srun_status is not None else (status or 0)
            who = "srun" if self.srun_status is not None else client
            code = describe_shell_exit(ended)
            what = "" if ended == 1 and self.said[None] else f"{who} ended ({code})"
            return self.cancelled or self.with_words(what, None)
        return f"salloc: {_IMPOSSIBLE}" if self.is_impossible else None

    @property
    def is_impossible(self) -> bool:
        """Whether Slurm has said that no nodes will ever do, though it goes on to wait for them."""
        return not self.is_granted and any(_IMPOSSIBLE in line for line in self.said[None])


def _numbers(text: str) -> Iterator[int]:
    """Give the numbers of ``0,2-4``."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


class SlurmClient(Client[StepLog]):
    """A salloc or srun. held: our end of a pipe by which it knows of us; closed with its stdin."""

    log_type = StepLog
    held = -1

    @property
    def name(self) -> str:
        return "salloc" if self.said.owned else "srun"

    def give(self, tickets: Sequence[Ticket]) -> None:
        """Give the agents their tickets, which lie with the client until there are agents."""
        assert self._process is not None and self._process.stdin is not None
        fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # nobody reads while it is in the queue
        self.write(encode_tickets(tickets) + b"\n")

    def close_stdin(self) -> None:
        super().close_stdin()
        if self.held >= 0:
            os.close(self.held)
            self.held = -1


class Allocation:
    """Nodes of Slurm, ours or not, and the clients that start agents there. log: that of the first client."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._clients: dict[Path, SlurmClient] = {}
        self._looked, self._queue = 0.0, ""
        self.sizes = "see sinfo"
        """Return the number of nodes that were asked for, and the number found, in words."""

    @property
    def job(self) -> str:
        """Its number; empty until Slurm has said it."""
        return self._first.said.job

    @property
    def is_ours(self) -> bool:
        """Whether it was asked for here, or is asked for."""
        return self._first.said.owned or not self.job

    def nodes(self) -> set[str]:
        """Return its nodes that answer; none once it has ended."""
        if not self.job:
            return set()
        try:
            state, _, names = ask("squeue", "-h", "-j", self.job, "-o", "%T|%N").strip().partition("|")
            listed = ask("sinfo", "-h", "-N", "-n", names, "-o", "%N %T") if state == "RUNNING" else ""
        except SpawnError:  # it has ended, or whoever starts a host says what is wrong
            return set()
        told = (line.split() for line in listed.splitlines())
        return {name for name, state in told if not (state.startswith(("down", "fail")) or state.endswith("*"))}

    @property
    def _first(self) -> SlurmClient:
        return self._clients.get(self.log) or SlurmClient(self.log, 0, 0)

    def start(self, command: list[str], tickets: Sequence[Ticket], log: Path, job: str) -> SlurmClient:
        """Start a client. job: where the allocation is there already. Raises: OSError, SpawnError."""
        program, (watched, held) = program_of("Slurm", command[0]), os.pipe2(os.O_CLOEXEC)
        guard = [] if job else ["sh", "-c", _GUARD, "meshbook", f"/proc/self/fd/{watched}"]
        try:
            if job:
                with open_log(log) as output:
                    output.write(f"{_RUNS_IN}{job}\n".encode())
            client = SlurmClient.start(log, [*guard, program, *command[1:]], [watched] if guard else [])
        except BaseException:
            os.close(held)
            raise
        finally:
            os.close(watched)
        client.held, self._clients[log] = held, client
        client.give([elsewhere(ticket) for ticket in tickets])
        return client

    def find(self, log: Path, pid: int, started: int) -> SlurmClient:
        """Return the client of a former controller that has this log."""
        return self._clients.setdefault(log, SlurmClient(log, pid, started))

    def look_at_queue(self) -> str:
        """Return the state of its job in the queue, and the reason; empty once it runs."""
        said = self._first.said
        if said.is_granted:
            return ""
        if time.monotonic() - self._looked > LOOK_S:
            with contextlib.suppress(SpawnError):
                state, _, why = ask("squeue", "-h", "-j", said.job, "-o", "%T|%r").strip().partition("|")
                self._queue = f"job {said.job} is {state.lower()} in the queue of Slurm ({why})" if said.job else ""
            self._looked = time.monotonic()
        return self._queue or "salloc asks Slurm for nodes"

    def leave(self, host_id: str, client: SlurmClient, timeout_s: float) -> None:
        """End a host, or note its end; after the last one all that was started here ends, within the time."""
        client.hosts.pop(host_id, None)
        if not any(each.hosts for each in self._clients.values()):
            self._end(timeout_s)
        elif client is not self._first:
            client.end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        first = self._first.said
        if first.owned and first.job and timeout_s < END_S:
            self._cancel()
        for client in reversed(self._clients.values()):
            client.end(max(0.0, deadline - time.monotonic()))
        if self._first.said.owned and self.job and not self._first.said.is_given_back:
            self._cancel()

    def _cancel(self) -> None:
        """Cancel the job, which is ours."""
        with contextlib.suppress(SpawnError):  # it has ended
            ask("scancel", "--quiet", self.job)


_allocations: weakref.WeakValueDictionary[Path, Allocation] = weakref.WeakValueDictionary()


def allocation_of(log: Path) -> Allocation:
    """Return the allocation whose first client has this log."""
    found = _allocations.get(log)
    if found is None:
        found = _allocations[log] = Allocation(log)
    return found


def ask(*command: str, timeout_s: float = ANSWER_S) -> str:
    """Return the answer of a command of Slurm. Raises: SpawnError."""
    answer = answer_of("Slurm", *command, timeout_s=timeout_s)
    if NO_CLUSTER in answer.stderr:
        raise SpawnError(
            f"{command[0]} is here, but finds no Slurm cluster: there is no slurm.conf (SLURM_CONF can name one), and "
            "DNS names no server of one"
        )
    if answer.returncode:
        raise SpawnError(describe_failure(answer))
    return answer.stdout


def describe_nodes(asked: int) -> str:
    """Say how many nodes are asked for, and how many each partition has. Raises: SpawnError."""
    there = ", ".join(ask("sinfo", "-h", "-o", "%R has %D").splitlines())
    return f"hosts={asked}, and of the partitions {there}; see sinfo"


def address_for_nodes() -> str:
    """Return the address of this machine that leads to the nodes. Raises: SpawnError if Slurm does not answer."""
    return address_reaching(list(dict.fromkeys(ask("sinfo", "-h", "-N", "-o", "%o").split()))[:8])
