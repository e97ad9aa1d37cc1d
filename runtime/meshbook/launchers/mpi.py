"""Host agents by mpirun, of Open MPI or MPICH: one agent on each host that it knows of, by its options or by its job.

    controller ──stdin: the tickets──> mpirun ════> its daemon on each host ──> sh ──> agent
        '── own address: port <══════════════════ network ════════════════════════════'

The tickets lie in a file of mode 0600 in the session's folder of logs until all have read it: for MPICH, whose hosts
must share that folder, and for those of Open MPI on mpirun's own machine, which never get its stdin. All others of
Open MPI have them by stdin (``--stdin all``). Each agent takes the ticket of its rank. No MPI is spoken: sh ends with 0
however its agent has ended, so that mpirun lets the others live on, and says in its log how that was. A lost host is
started again by an mpirun of its own.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.agent_start import PYTHON_HINTS, agent_script, with_words
from meshbook.launchers.base import EngineLauncher, LaunchedHost, Launcher
from meshbook.launchers.engines.clients import ENDED, ON, Client, ClientHost, TaskLog
from meshbook.launchers.engines.commands import answer_of
from meshbook.launchers.registry import Asked
from meshbook.sessions.folder import SavedHost
from meshbook.system.exits import end_process
from meshbook.system.processes import describe_exit, describe_shell_exit
from meshbook.system.user_folders import write_private
from meshbook.wire.ticket import Ticket, elsewhere, encode_tickets

ANSWER_S = 10.0
"""The time within which mpirun has to say its version."""

_PROGRAMS = ("mpirun", "mpiexec")
_HOSTS = ("-H", "-host", "--host", "-hosts", "--hosts")
"""Options with the names of hosts, in which a single one takes their place."""

_NOT_FOR_US = re.compile(r"--?(n|np|c|N|ppn|npernode|pernode|map-by|rankfile|stdin|tag-output|prepend-rank|s)(=.*)?$")

_LABEL = re.compile(r"\[(?:\d+,)?(\d+)\](?:<std\w+>:| )(.*)")
"""``[1,0]<stderr>:`` of Open MPI, ``[0] `` of MPICH."""
_RULE = re.compile(r"[-=]{20,}$")
_NOISE = re.compile(r"(=   |\* |\[mpiexec@|\[proxy:)|mpirun\S* noticed|.*Forwarding signal")
_UNREACHED = re.compile(
    r"ssh: |(ssh|kex)_exchange_identification|Host key verification failed|\S+: Permission denied \("
)
"""The words of ssh for a host that it does not reach, after which MPICH goes on waiting for it."""
_FIRST_LINES = 4
"""The number of lines of mpirun that a message has, the first ones: mpirun repeats itself."""

_FEW = "more processes than the ppr"
"""Part of the complaint of Open MPI where its options name fewer nodes than there are to be hosts."""

_HINTS = (
    *PYTHON_HINTS,
    ("meshbook: no ticket", "MPICH gives stdin to one process: that folder must be shared with the hosts."),
    ("run as root", "Say that it may: set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
)


@dataclass
class MPILog(TaskLog):
    """The log of mpirun and of the agents that it has started. ends: their exit codes, by task."""

    ends: dict[int, int] = field(default_factory=dict)

    label = _LABEL
    hints = _HINTS

    def add_said(self, task: int | None, line: str) -> None:
        if task is not None and line.startswith(ENDED):
            self.ends[task] = int(line.removeprefix(ENDED))
        elif line and not _NOISE.match(line) and not _RULE.match(line):
            self.said[task].append(line)

    def why_ended(self, task: int, status: int | None) -> str | None:
        """Return why there is no agent any more, or will be none; None while there may be.

        status: the exit status of mpirun, as in `subprocess`; None while it runs.
        """
        node = self.nodes.get(task, "")
        if node and node in [self.nodes.get(other) for other in range(task)]:
            return f"mpirun has put two agents on {node}, and each host gets one: name as many hosts as hosts=N says"
        if task in self.ends:
            how = describe_shell_exit(self.ends[task])
            return self.with_words(f"its agent{node and f' on {node}'} ended ({how})", task)
        told = self.said[None]
        unreached = next(filter(_UNREACHED.match, told), "")
        if unreached and not node:
            return f"mpirun does not reach its hosts: {unreached.rstrip('.')}"
        if status is None:
            return None
        if any(_FEW in line for lines in self.said.values() for line in lines):
            return "mpirun's options name fewer nodes than hosts=N asks for, and each host is a node of its own"
        return with_words(f"mpirun ended ({describe_exit(status)})", [" ".join(told[:_FIRST_LINES])], _HINTS)


class MPIClient(Client[MPILog]):
    """An mpirun."""

    log_type = MPILog

    def leave(self, host_id: str, timeout_s: float) -> None:
        if not self.hosts.keys() - {host_id}:
            self._remove_tickets()  # first: an agent that has not begun yet ends by itself
        super().leave(host_id, timeout_s)

    def end(self, timeout_s: float) -> None:
        """End mpirun and all that it has started here, which MPICH leaves behind when it is told to end too soon."""
        self.close_stdin()
        end_process(self.pid, self.started, timeout_s, below=True)
        super().end(timeout_s)

    def settle(self) -> None:
        """Remove the file with the tickets once all have read it."""
        if self._process is not None and self.hosts and len(self.said.nodes) >= len(self.hosts):
            self._remove_tickets()

    def _remove_tickets(self) -> None:
        self.log.with_suffix(".tickets").unlink(missing_ok=True)


class MPIHost(ClientHost[MPIClient]):
    """An agent that is a process of mpirun."""

    @property
    def node(self) -> str:
        """The name of the agent's machine, as that calls itself; empty until it has said so."""
        return self.client.said.nodes.get(self.task, "")

    def failure(self) -> str | None:
        self.client.settle()
        status = self.client.poll()  # first: when it has ended, the log is whole
        return self.client.said.why_ended(self.task, status)


class MPILauncher(EngineLauncher[MPIHost]):
    """An agent on each of so many hosts that mpirun knows of."""

    name = "mpi"
    fixed = "its hosts are those that mpirun was given"

    def __init__(self, *, program: str = "", python: str | None = None, options: Sequence[str] = ()) -> None:
        """program: a name or a path; by default mpirun, or mpiexec. options: of it, as ``--hostfile F``.

        python: the interpreter there; by default the path of our own where there is one, else ``python3``.
        Raises: UsageError.
        """
        super().__init__(python, options)
        self.program = program
        for option in self.options:
            if _NOT_FOR_US.match(option):
                raise UsageError(f"mpirun cannot be given {option} here: hosts=N says how many, with an agent on each.")

    @property
    def named(self) -> tuple[str, ...]:
        return (self.program,)

    def _start(self, tickets: list[Ticket]) -> list[MPIHost]:
        """Start mpirun; the agents come when it has started them. Raises: OSError, SpawnError."""
        log = Path(tickets[0].log_dir) / f"agent-{tickets[0].host_id}.log"
        program = _find(self.program)
        by_stdin = _is_open_mpi(program)
        options, hosts = self.options, len(tickets)
        if self._place is not None:
            if not self._place.node:
                raise SpawnError("mpirun has never said where the host was; spawn the mesh again")
            named = ("--host", self._place.node) if by_stdin else ("-hosts", self._place.node)
            options = (*_without_hosts(options), *named)
        count = ("-np", str(hosts))
        ours = ("--stdin", "all", "--tag-output", "--map-by", "ppr:1:node", "--bind-to", "none")
        command = [program, *options, *count, *(ours if by_stdin else ("-ppn", "1", "-prepend-rank"))]
        data = encode_tickets([elsewhere(ticket, ends_with_launcher=True) for ticket in tickets]) + b"\n"
        tickets_file = log.with_suffix(".tickets")
        write_private(tickets_file, data)
        client = MPIClient.start(log, [*command, "sh", "-c", _script(self.python, tickets_file, by_stdin)])
        if by_stdin:
            client.write(data)
        return [MPIHost(client, ticket.host_id, task=task) for task, ticket in enumerate(tickets)]


def parse(asked: Asked) -> MPILauncher:
    return MPILauncher(program=asked.named, python=asked.python, options=asked.options)


def find(id: str, saved: SavedHost, logs: Path) -> tuple[LaunchedHost, Launcher]:
    launcher = saved.launcher
    host = MPIHost(MPIClient.find(logs / launcher.job, saved.pid, saved.started), id, task=launcher.task)
    program, *options = launcher.options
    return host, MPILauncher(program=program, python=launcher.python, options=options).in_place_of(host)


def _script(python: str, tickets: Path, by_stdin: bool) -> str:
    """Return the script for sh on each host.

    tickets: the file with the tickets. by_stdin: whether they come by stdin where there is no such file.
    """
    rank = "MESHBOOK_TASK=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}; export MESHBOOK_TASK"
    on, agent = f'echo "{ON}$(uname -n)" >&2', f"({agent_script(python)})"
    path = shlex.quote(str(tickets))
    other = f"{on}; {agent}" if by_stdin else f"echo meshbook: no ticket at {path} >&2; (exit 66)"
    run = f"if t=$(cat {path} 2>&-); then {on}; printf '%s\\n' \"$t\" | {agent}; else {other}; fi"
    return f'{rank}; {run}; echo "{ENDED}$?" >&2'


def _find(program: str) -> str:
    """Raises: SpawnError."""
    for name in (program,) if program else _PROGRAMS:
        if (path := shutil.which(name)) is not None:
            return path
    raise SpawnError(
        f"there is no {program or 'mpirun'} on this machine; load the module that has it, install it "
        "(apt-get install openmpi-bin), or name another: --on mpi:PATH"
    )


def _is_open_mpi(program: str) -> bool:
    """Whether the program is Open MPI's, else MPICH's. Raises: SpawnError if it is neither."""
    done = answer_of("MPI", program, "--version", timeout_s=ANSWER_S)
    if "Open MPI" in done.stdout or "OpenRTE" in done.stdout:
        return True
    if "HYDRA" in done.stdout or "Intel(R) MPI" in done.stdout:
        return False
    said = (done.stdout or done.stderr).strip().partition("\n")[0]
    raise SpawnError(f"{program} is neither of Open MPI nor of MPICH, as far as it says: {said or 'nothing'}")


def _without_hosts(options: Sequence[str]) -> Iterator[str]:
    """Give the options without the names of hosts."""
    rest = iter(options)
    for option in rest:
        if option in _HOSTS:
            next(rest, None)
        elif option.partition("=")[0] not in _HOSTS:
            yield option
