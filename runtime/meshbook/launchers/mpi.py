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

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.base import LaunchedHost, Launcher
from meshbook.launchers.engines.client import Client
from meshbook.launchers.engines.mpi_log import ENDED, ON, MPILog
from meshbook.launchers.local import reap_released
from meshbook.launchers.registry import Asked
from meshbook.launchers.starting.elsewhere import agent_script
from meshbook.launchers.starting.head_start import open_log
from meshbook.sessions.folder import SavedHost, SavedLauncher
from meshbook.system.exits import end_process
from meshbook.system.interfaces import in_endpoint, own_address
from meshbook.system.processes import start_time
from meshbook.wire.ticket import Ticket, elsewhere, encode_tickets

ANSWER_S = 10.0
"""How long it may take to say its version."""

_PROGRAMS = ("mpirun", "mpiexec")
_HOSTS = ("-H", "-host", "--host", "-hosts", "--hosts")
"""Options with the names of hosts, in which a single one takes their place."""

_NOT_FOR_US = re.compile(r"--?(n|np|c|N|ppn|npernode|pernode|map-by|rankfile|stdin|tag-output|prepend-rank|s)(=.*)?$")


class MPILauncher:
    """An agent on each of so many hosts that mpirun knows of."""

    name = "mpi"
    shares_environment = False
    place_is_gone = False
    fixed = "its hosts are those that mpirun was given"
    named_hosts = ()

    def __init__(
        self,
        *,
        program: str = "",
        python: str | None = None,
        options: Sequence[str] = (),
        place: MPIHost | None = None,
    ) -> None:
        """program: a name or a path; by default mpirun, or mpiexec. options: of it, as ``--hostfile F``.

        python: the interpreter there; by default the path of our own where there is one, else ``python3``.
        place: a host in whose place, where it was, it starts another one. Raises: UsageError.
        """
        self.program, self.python, self.options = program, python or "", tuple(map(str, options))
        self._place, self._launched = place, list[MPIHost]()
        for option in self.options:
            if _NOT_FOR_US.match(option):
                raise UsageError(f"mpirun cannot be given {option} here: hosts=N says how many, with an agent on each.")

    @property
    def transport(self) -> str:
        return f"tcp://{in_endpoint(own_address())}"

    def for_host(self, index: int) -> MPILauncher:
        place = self._launched[index] if self._launched else None
        return MPILauncher(program=self.program, python=self.python, options=self.options, place=place)

    def for_more(self, beside: Sequence[LaunchedHost]) -> MPILauncher:
        return MPILauncher(program=self.program, python=self.python, options=self.options)

    @property
    def saved(self) -> SavedLauncher:
        saved = SavedLauncher(self.name, python=self.python, options=(self.program, *self.options))
        return saved if self._place is None else self._place.save(saved)

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        """Start mpirun; the agents come when it has started them. Raises: OSError, SpawnError."""
        reap_released()
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
        data = encode_tickets([_own(ticket) for ticket in tickets]) + b"\n"
        tickets_file = log.with_suffix(".tickets")
        with open(os.open(tickets_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        with open_log(log) as output:
            process = subprocess.Popen(
                [*command, "sh", "-c", _script(self.python, tickets_file, by_stdin)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        client = MPIClient(log, process.pid, start_time(process.pid) or 0, process)
        if by_stdin:
            client.write(data)
        self._launched = [MPIHost(client, ticket.host_id, task) for task, ticket in enumerate(tickets)]
        return list(self._launched)


class MPIClient(Client[MPILog]):
    """An mpirun. hosts: the ids of those that are there; with the last one it ends."""

    def __init__(self, log: Path, pid: int, started: int, process: subprocess.Popen[bytes] | None = None) -> None:
        super().__init__(log, pid, started, process)
        self.hosts: set[str] = set()

    def _read(self, text: str) -> MPILog:
        return MPILog.read(text)

    def leave(self, host_id: str, timeout_s: float) -> None:
        """A host has ended, or is to."""
        self.hosts.discard(host_id)
        if not self.hosts:
            self._remove_tickets()  # first: an agent that has not begun yet ends by itself
            self.end(timeout_s)

    def end(self, timeout_s: float) -> None:
        """As others, and all that it has started here: MPICH leaves that behind when it is told to end too soon."""
        self.close_stdin()
        end_process(self.pid, self.started, timeout_s, below=True)
        super().end(timeout_s)

    def settle(self) -> None:
        """Remove the file with the tickets once all have read it."""
        if self._process is not None and self.hosts and len(self.said.nodes) >= len(self.hosts):
            self._remove_tickets()

    def _remove_tickets(self) -> None:
        self.log.with_suffix(".tickets").unlink(missing_ok=True)


class MPIHost:
    """An agent that is a process of mpirun."""

    job = ""

    def __init__(self, client: MPIClient, host_id: str, task: int) -> None:
        self._client, self._id, self._task = client, host_id, task
        self.pid, self.started = client.pid, client.started
        client.hosts.add(host_id)

    @property
    def node(self) -> str:
        """Where it is, as its machine calls itself; empty until it has said so."""
        return self._client.said.nodes.get(self._task, "")

    def save(self, saved: SavedLauncher) -> SavedLauncher:
        """``saved``, with what `find` needs."""
        log = self._client.log.name
        return SavedLauncher(
            saved.engine, python=saved.python, options=saved.options, job=log, step=log, task=self._task
        )

    def failure(self) -> str | None:
        self._client.settle()
        status = self._client.poll()  # first: when it has ended, the log is whole
        return self._client.said.why_ended(self._task, status, "mpirun")

    def waits_for(self) -> str:
        return ""

    def close(self, timeout_s: float) -> None:
        """Leave mpirun, which ends with its last host; the agent was told, if it hears."""
        self._client.leave(self._id, timeout_s)

    def release(self) -> None:
        self._client.release()


def parse(asked: Asked) -> MPILauncher:
    """See `meshbook.launchers.registry`."""
    return MPILauncher(program=asked.named, python=asked.python, options=asked.options)


def find(hosts: Mapping[str, SavedHost], logs: Path) -> Iterator[tuple[str, LaunchedHost, Launcher]]:
    """See `meshbook.launchers.registry`."""
    clients: dict[str, MPIClient] = {}
    for id, saved in hosts.items():
        launcher = saved.launcher
        client = clients.get(launcher.step) or MPIClient(logs / launcher.step, saved.pid, saved.started)
        host = MPIHost(clients.setdefault(launcher.step, client), id, launcher.task)
        program, *options = launcher.options
        yield id, host, MPILauncher(program=program, python=launcher.python, options=options, place=host)


def _script(python: str, tickets: Path, by_stdin: bool) -> str:
    """What sh runs on each host. tickets: the file with them. by_stdin: they come so where there is no such file."""
    rank = "MESHBOOK_TASK=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}; export MESHBOOK_TASK"
    on, agent = f'echo "{ON}$(uname -n)" >&2', f"({agent_script(python)})"
    path = shlex.quote(str(tickets))
    other = f"{on}; {agent}" if by_stdin else f"echo meshbook: no ticket at {path} >&2; (exit 66)"
    run = f"if t=$(cat {path} 2>&-); then {on}; printf '%s\\n' \"$t\" | {agent}; else {other}; fi"
    return f'{rank}; {run}; echo "{ENDED}$?" >&2'


def _own(ticket: Ticket) -> Ticket:
    """It ends with mpirun, which reads what it says."""
    return msgspec.structs.replace(elsewhere(ticket), ends_with_launcher=True)


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
    """Whether it is Open MPI's, else MPICH's. Raises: SpawnError if it is neither."""
    try:
        done = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S
        )
    except subprocess.TimeoutExpired:
        raise SpawnError(f"{program} --version has not answered within {ANSWER_S:g} s") from None
    if "Open MPI" in done.stdout or "OpenRTE" in done.stdout:
        return True
    if "HYDRA" in done.stdout or "Intel(R) MPI" in done.stdout:
        return False
    said = (done.stdout or done.stderr).strip().partition("\n")[0]
    raise SpawnError(f"{program} is neither of Open MPI nor of MPICH, as far as it says: {said or 'nothing'}")


def _without_hosts(options: Sequence[str]) -> Iterator[str]:
    """The options without the names of hosts."""
    rest = iter(options)
    for option in rest:
        if option in _HOSTS:
            next(rest, None)
        elif option.partition("=")[0] not in _HOSTS:
            yield option
