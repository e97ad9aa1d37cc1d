"""What salloc, srun and their tasks have said: the job, where its tasks are, and how they ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshbook.launchers.starting.elsewhere import PYTHON_HINTS, with_hint
from meshbook.system.processes import describe_shell_exit

_JOB = re.compile(r"(?:salloc: (?:Pending|Granted) job allocation|meshbook: job) (\d+)")
_SALLOC = re.compile(r"(?:/\S*/)?salloc: ")
"""What it says of its options begins with its path."""
_RUNS_IN = "meshbook: job "
_LABEL = re.compile(r"(\d+): (.*)")
_NODE = "meshbook: on "
_SRUN_ENDED = re.compile(r"meshbook: srun ended (\d+)")
_TASKS_ENDED = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.*)")
_NODE_FAILED = re.compile(r"srun: error: Node failure on (\S+)")
_CANCELLED = re.compile(r"\*\*\* (?:STEP|JOB) (\d+)\S* ON \S+ CANCELLED AT \S+(?: DUE TO (.*?))? \*\*\*")
"""The number of a step begins with that of its job."""
_IMPOSSIBLE = "Requested partition configuration not available now"
"""salloc says so of what no node of the partition will ever be, and waits all the same."""

_NOISE = re.compile(
    r"salloc: (Granted|Pending|Relinquishing|Nodes |Waiting for|job \d+ (queued|has been allocated))"
    r"|srun: (Job step aborted|Force Terminated|launch/|Terminating|forcing|cluster configuration lacks)"
    r"|srun: error: \S+: tasks? [\d,-]+: "
)
_SAID_LINES = 3

_HINTS = (
    *(
        (words, "Its allocation has no node for it, see sinfo")
        for words in ("node configuration is not available", "Hostlist is empty")
    ),
    *PYTHON_HINTS,
    *((words, "Its allocation has ended: spawn the mesh again.") for words in ("nvalid job", "already completing")),
)


@dataclass
class StepLog:
    """What a log says. nodes, ends: by task."""

    job: str = ""
    owned: bool = False
    """Whether the job was asked for by the salloc that wrote this."""
    is_granted: bool = False
    nodes: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    failed_nodes: set[str] = field(default_factory=set)
    srun_status: int | None = None
    cancelled: str = ""
    said: list[tuple[int | None, str]] = field(default_factory=list)
    """Lines, each with the task that wrote it; None: salloc or srun."""

    @classmethod
    def read(cls, text: str) -> StepLog:
        found = cls()
        for line in filter(None, map(str.strip, text.splitlines())):
            found._read_line(line)
        return found

    def _read_line(self, line: str) -> None:
        labelled = _LABEL.match(line)
        task, line = (int(labelled[1]), labelled[2]) if labelled else (None, line)
        self.owned = self.owned or _SALLOC.match(line) is not None
        if match := _CANCELLED.search(line):
            why = f": {match[2].lower()}" if match[2] else ""
            self.cancelled = f"Slurm has cancelled job {match[1]}{why}"
        elif task is not None and line.startswith(_NODE):
            self.nodes[task] = line.removeprefix(_NODE)
        elif match := _SRUN_ENDED.match(line):
            self.srun_status = int(match[1])
        elif match := _NODE_FAILED.match(line):
            self.failed_nodes.add(match[1].rstrip(","))
        elif match := _TASKS_ENDED.match(line):
            self.ends.update(dict.fromkeys(_numbers(match[1]), match[2]))
        elif not _NOISE.match(line) and not line.startswith("meshbook: job"):
            self.said.append((task, re.sub(r"^(salloc|srun|slurmstepd\S*): (error: |fatal: )?", r"\1: ", line)))
        if match := _JOB.match(line):
            self.job = match[1]
        self.is_granted = self.is_granted or line.startswith(_RUNS_IN)

    def why_ended(self, task: int, node: str, client: str, status: int | None) -> str | None:
        """Why there is no agent any more, or will be none; None while there may be.

        client: what writes this log; status: how that has ended, as in `subprocess`; None while it runs.
        """
        where = f" on {node}" if node else ""
        if node in self.failed_nodes:
            return f"node {node} has failed, as Slurm says"
        if task in self.ends:
            return self.cancelled or self._with_words(f"its agent{where} ended ({self.ends[task].lower()})", task)
        if self.srun_status is not None or status is not None:
            ended = self.srun_status if self.srun_status is not None else (status or 0)
            who = "srun" if self.srun_status is not None else client
            code = describe_shell_exit(ended)
            said = self._words(None)
            return self.cancelled or (said if said and ended == 1 else self._with_words(f"{who} ended ({code})", None))
        return f"salloc: {_IMPOSSIBLE}" if self.is_impossible else None

    @property
    def is_impossible(self) -> bool:
        """Whether Slurm has said that no nodes will ever do, though it goes on to wait for them."""
        return not self.is_granted and any(_IMPOSSIBLE in line for _, line in self.said)

    def _with_words(self, what: str, task: int | None) -> str:
        said = self._words(task)
        return f"{what}: {said}" if said else what

    def _words(self, task: int | None) -> str:
        """What a task, or Slurm, said last, and what to do about it."""
        lines = [line for who, line in self.said if who == task][-_SAID_LINES:]
        return with_hint("; ".join(line.rstrip(".") for line in lines), _HINTS)


def _numbers(text: str) -> Iterator[int]:
    """The numbers of ``0,2-4``."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
