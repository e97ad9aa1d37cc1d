"""What mpirun and the agents that it has started have said: where these are, how they ended, what is wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from meshbook.launchers.starting.elsewhere import PYTHON_HINTS, with_hint
from meshbook.system.processes import describe_exit, describe_shell_exit

ON, ENDED = "meshbook: on ", "meshbook: ended "

_LABEL = re.compile(r"\[(?:\d+,)?(\d+)\](?:<std\w+>:| )(.*)")
"""``[1,0]<stderr>:`` of Open MPI, ``[0] `` of MPICH."""
_RULE = re.compile(r"[-=]{20,}$")
_NOISE = re.compile(r"(=   |\* |\[mpiexec@|\[proxy:)|mpirun\S* noticed|.*Forwarding signal")
_UNREACHED = re.compile(
    r"ssh: |(ssh|kex)_exchange_identification|Host key verification failed|\S+: Permission denied \("
)
"""What ssh says of a host that it does not reach, after which MPICH goes on waiting for it."""
_SAID_LINES, _SAID_CHARS = 4, 400

_FEW = "more processes than the ppr"
"""In what Open MPI says where its options name fewer nodes than there are to be hosts."""

_HINTS = (
    *PYTHON_HINTS,
    ("meshbook: no ticket", "MPICH gives stdin to one process: that folder must be shared with the hosts."),
    ("run as root", "Say that it may: set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
)


@dataclass
class MPILog:
    """What a log says. nodes, ends: by task."""

    nodes: dict[int, str] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    said: list[tuple[int | None, str]] = field(default_factory=list)
    """Lines, each with the task that wrote it; None: mpirun."""

    @classmethod
    def read(cls, text: str) -> MPILog:
        found = cls()
        for line in filter(None, map(str.strip, text.splitlines())):
            labelled = _LABEL.match(line)
            task, line = (int(labelled[1]), labelled[2].strip()) if labelled else (None, line)
            if task is not None and line.startswith(ON):
                found.nodes[task] = line.removeprefix(ON)
            elif task is not None and line.startswith(ENDED):
                found.ends[task] = int(line.removeprefix(ENDED))
            elif line and not _NOISE.match(line) and not _RULE.match(line):
                found.said.append((task, line))
        return found

    def why_ended(self, task: int, status: int | None, program: str) -> str | None:
        """Why there is no agent any more, or will be none; None while there may be.

        status: how the program has ended, as in `subprocess`; None while it runs.
        """
        node = self.nodes.get(task, "")
        if node and node in [self.nodes.get(other) for other in range(task)]:
            return f"mpirun has put two agents on {node}, and each host gets one: name as many hosts as hosts=N says"
        if task in self.ends:
            code = self.ends[task]
            how = describe_shell_exit(code)
            return self._with_words(f"its agent{node and f' on {node}'} ended ({how})", task)
        unreached = next((line for who, line in self.said if who is None and _UNREACHED.match(line)), "")
        if unreached and not node:
            return f"mpirun does not reach its hosts: {unreached.rstrip('.')}"
        if status is not None and any(_FEW in line for _, line in self.said):
            return "mpirun's options name fewer nodes than hosts=N asks for, and each host is a node of its own"
        return None if status is None else self._with_words(f"{program} ended ({describe_exit(status)})", None)

    def _with_words(self, what: str, task: int | None) -> str:
        """And what was said of it: by a task last, by mpirun first, since it repeats itself."""
        lines = [line for who, line in self.said if who == task]
        told = lines[:_SAID_LINES] if task is None else lines[-_SAID_LINES:]
        said = " ".join(told)[:_SAID_CHARS].rstrip(".")
        return with_hint(f"{what}: {said}" if said else what, _HINTS)
