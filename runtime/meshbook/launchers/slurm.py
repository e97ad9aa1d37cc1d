"""Host agents on the nodes of a Slurm cluster: an allocation, and in it one srun that starts an agent on each node.

    controller ──stdin: the tickets──> salloc ──> sh ──> srun ════> slurmstepd of each node ──> sh ──> agent
        '── own address: port <══════════════════════════ network ════════════════════════════════════════'

salloc waits in the queue; its command runs here. srun passes its stdin on to all tasks, and each agent takes the ticket
of its number: no secret is on a command line or in an environment. When srun has ended, sh holds the allocation as long
as the controller or another step is there, so that a lost host comes back on its node by a step of its own
(``srun --jobid --overlap``). In an allocation that is there already, as the environment says, srun runs by itself.

All of them outlive the controller, as agents do. What they say goes to a file, of which all that is known here is read
(`meshbook.launchers.slurm_log`), by the next controller too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.base import LaunchedHost
from meshbook.launchers.client import END_S, Client
from meshbook.launchers.elsewhere import agent_script
from meshbook.launchers.head_start import open_log
from meshbook.launchers.local import reap_released
from meshbook.launchers.slurm_log import StepLog
from meshbook.sessions.folder import SavedHost, SavedLauncher
from meshbook.system.processes import address_towards, in_endpoint, own_address, start_time
from meshbook.wire.ticket import Ticket, elsewhere, encode_tickets

ANSWER_S = 10.0
"""How long commands of Slurm may take to answer."""
PIPE_BYTES = 1 << 20
"""What a pipe may hold: the tickets of some 2,000 hosts."""
LOOK_S = 2.0
"""How often the queue is looked at."""

_SRUN = (
    "srun", "--label", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--overlap", "--cpu-bind=none",
    "--ntasks-per-node=1",
)  # fmt: skip
"""One that ends has the others live on, and several steps share a node."""

_GUARD = """
(cat "$1" >/dev/null 2>&1; read -r _ _ _ parent _ </proc/self/stat; [ "$parent" = $$ ] && kill $$) &
export MESHBOOK_GUARD=$!
shift
exec "$@"
"""
"""What becomes salloc: while that is in the queue it ends with us, who hold the other end of the pipe $1."""

_HOLD = """
kill "$MESHBOOK_GUARD"
echo "meshbook: job $SLURM_JOB_ID" >&2
"$@"
echo "meshbook: srun ended $?" >&2
cat >/dev/null
while [ -n "$(squeue -h -s -j "$SLURM_JOB_ID" -o %i)" ]; do sleep 2; done
"""
"""What salloc runs; ``cat`` returns when there is no controller any more."""

_NOT_FOR_US = ("-N", "--nodes", "-n", "--ntasks", "--ntasks-per-node")


class SlurmLauncher:
    """An agent on each node of an allocation: that which this process runs in, else one of its own."""

    name = "slurm"
    shares_environment = False
    fixed = "its hosts are the nodes of its allocation"

    def __init__(
        self, *, python: str | None = None, options: Sequence[str] = (), place: SlurmHost | None = None
    ) -> None:
        """options: of salloc; of srun where there is an allocation already.

        python: the interpreter there; by default the path of our own where there is one, else ``python3``.
        place: a host on whose node, and in whose allocation, it starts another one. Raises: UsageError.
        """
        self.python, self.options, self._place = python or "", tuple(map(str, options)), place
        self._launched: list[SlurmHost] = []
        self._address = ""
        for option in self.options:
            if option.partition("=")[0] in _NOT_FOR_US:
                raise UsageError(f"Slurm cannot be given {option} here: hosts=N says how many nodes, an agent on each.")

    @property
    def transport(self) -> str:
        known = self._place.allocation.address if self._place else ""
        self._address = known or f"tcp://{in_endpoint(_address_for_nodes())}"
        return self._address

    def for_host(self, index: int) -> SlurmLauncher:
        place = self._launched[index] if self._launched else None
        return SlurmLauncher(python=self.python, options=self.options, place=place)

    @property
    def saved(self) -> SavedLauncher:
        saved = SavedLauncher(self.name, python=self.python, options=self.options)
        return saved if self._place is None else self._place.save(saved)

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        """Ask for nodes and an agent on each; both come when Slurm has them. Raises: OSError, SpawnError."""
        reap_released()
        log = Path(tickets[0].log_dir) / f"agent-{tickets[0].host_id}.log"
        if len(encode_tickets(tickets)) > PIPE_BYTES:
            raise UsageError(f"{len(tickets)} nodes are more than one srun gets tickets for; spawn two meshes.")
        count, own_job, node = str(len(tickets)), os.environ.get("SLURM_JOB_ID", ""), ""
        srun = [*_SRUN, f"--nodes={count}", f"--ntasks={count}"]
        agent = ["sh", "-c", f'echo "meshbook: on $SLURMD_NODENAME" >&2; {agent_script(self.python)}']
        if self._place is not None:
            allocation, node = self._place.allocation, self._place.node
            job = allocation.job
            command = [*srun, f"--jobid={job}", f"--nodelist={node}", *agent]
            if not job or not node:
                raise SpawnError("Slurm has never said on which node the host was; spawn the mesh again")
        else:
            allocation, job = _allocation(log), own_job
            command = [*srun, f"--jobid={job}", *self.options, *agent]
            if not job:
                salloc = ["salloc", "--no-kill", "--job-name=meshbook", f"--nodes={count}", "--ntasks-per-node=1"]
                command = [*salloc, *self.options, "sh", "-c", _HOLD, "meshbook", *srun, *agent]
        allocation.address = self._address
        client = allocation.start(command, tickets, log, job)
        self._launched = [
            SlurmHost(allocation, client, ticket.host_id, task, node) for task, ticket in enumerate(tickets)
        ]
        return list(self._launched)


class SlurmHost:
    """An agent that is a task of a client. node: where it is, if that is known before it says so."""

    def __init__(self, allocation: Allocation, client: SlurmClient, host_id: str, task: int, node: str) -> None:
        self.allocation, self._client, self._id, self._task, self._node = allocation, client, host_id, task, node
        self.pid, self.started = client.pid, client.started
        allocation.hosts.add(host_id)

    @property
    def node(self) -> str:
        """Empty until it is known."""
        return self._node or self._client.said.nodes.get(self._task, "")

    def save(self, saved: SavedLauncher) -> SavedLauncher:
        """``saved``, with what `found_host` needs."""
        return SavedLauncher(
            saved.engine, False, self._node, saved.python, saved.options,
            self.allocation.log.name, self._client.log.name, self._task,
        )  # fmt: skip

    def failure(self) -> str | None:
        status = self._client.poll()  # first: when it has ended, the log is whole
        return self._client.said.why_ended(self._task, self.node, self._client.name, status)

    @property
    def job(self) -> str:
        return self.allocation.job

    def waits_for(self) -> str:
        """What Slurm says of the queue."""
        return "" if self.failure() else self.allocation.look_at_queue()

    def close(self, timeout_s: float) -> None:
        """Leave the allocation, which ends with its last host; the agent was told, if it hears."""
        self.allocation.leave(self._id, self._client, timeout_s)

    def release(self) -> None:
        self._client.release()


def found_host(id: str, saved: SavedHost, logs: Path) -> SlurmHost:
    """A host that another controller has started. logs: of the session."""
    launcher = saved.launcher
    allocation = _allocation(logs / launcher.job)
    client = allocation.find(logs / launcher.step, saved.pid, saved.started)
    return SlurmHost(allocation, client, id, launcher.task, launcher.host)


class SlurmClient(Client[StepLog]):
    """A salloc or srun, and what it and its tasks say. held: our end of a pipe by which it knows of us."""

    def __init__(
        self, log: Path, pid: int, started: int, process: subprocess.Popen[bytes] | None = None, held: int = -1
    ) -> None:
        super().__init__(log, pid, started, process)
        self._held = held

    def _read(self, text: str) -> StepLog:
        return StepLog.read(text)

    @property
    def name(self) -> str:
        return "salloc" if self.said.owned else "srun"

    def give(self, tickets: Sequence[Ticket]) -> None:
        """Give the agents their tickets, which lie with it until there are agents."""
        assert self._process is not None and self._process.stdin is not None
        fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # nobody reads while it is in the queue
        self.write(encode_tickets(tickets) + b"\n")

    def close_stdin(self) -> None:
        super().close_stdin()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


class Allocation:
    """Nodes of Slurm, ours or not, and the clients that start agents there. log: of the first of these."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.hosts: set[str] = set()
        """The ids of those that are there; with the last one it ends."""
        self._clients: dict[Path, SlurmClient] = {}
        self._looked, self._queue = 0.0, ""
        self.address = ""
        """What its nodes reach, as in `Launcher.transport`, once that was found out."""

    @property
    def job(self) -> str:
        """Its number; empty until Slurm has said it."""
        return self._first.said.job

    @property
    def _first(self) -> SlurmClient:
        return self._clients.get(self.log) or SlurmClient(self.log, 0, 0)

    def start(self, command: list[str], tickets: Sequence[Ticket], log: Path, job: str) -> SlurmClient:
        """Start a client. job: where the allocation is there already. Raises: OSError, SpawnError."""
        program, (watched, held) = _program(command[0]), os.pipe2(os.O_CLOEXEC)
        guard = [] if job else ["sh", "-c", _GUARD, "meshbook", f"/proc/self/fd/{watched}"]
        try:
            with open_log(log) as output:
                if job:
                    output.write(f"meshbook: job {job}\n".encode())
                    output.flush()
                process = subprocess.Popen(
                    [*guard, program, *command[1:]],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=[watched] if guard else [],
                )
        except BaseException:
            os.close(held)
            raise
        finally:
            os.close(watched)
        client = self._clients[log] = SlurmClient(log, process.pid, start_time(process.pid) or 0, process, held)
        client.give([elsewhere(ticket) for ticket in tickets])
        return client

    def find(self, log: Path, pid: int, started: int) -> SlurmClient:
        """The client that has this log, of another controller."""
        return self._clients.setdefault(log, SlurmClient(log, pid, started))

    def look_at_queue(self) -> str:
        """Where its job is in the queue, and why; empty once it runs."""
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
        """A host has ended, or is to; without hosts everything ends that was started here, within the time."""
        self.hosts.discard(host_id)
        if not self.hosts:
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
        if self._first.said.owned and self.job and "Relinquishing" not in self.log.read_text(errors="replace"):
            self._cancel()

    def _cancel(self) -> None:
        """Cancel the job, which is ours."""
        with contextlib.suppress(SpawnError):  # it has ended
            ask("scancel", "--quiet", self.job)


_allocations: weakref.WeakValueDictionary[Path, Allocation] = weakref.WeakValueDictionary()


def _allocation(log: Path) -> Allocation:
    """That whose first client has this log."""
    found = _allocations.get(log)
    if found is None:
        found = _allocations[log] = Allocation(log)
    return found


def ask(*command: str) -> str:
    """What a command of Slurm says. Raises: SpawnError."""
    try:
        done = subprocess.run(
            [_program(command[0]), *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise SpawnError(f"Slurm does not answer: {command[0]} has not ended within {ANSWER_S:g} s") from None
    if done.returncode:
        raise SpawnError(f"{command[0]} failed: {'; '.join(done.stderr.split(chr(10))).strip('; ')}")
    return done.stdout


def _program(name: str) -> str:
    """Raises: SpawnError."""
    if (path := shutil.which(name)) is None:
        raise SpawnError(
            f"there is no {name} on this machine; Slurm is used from a login node of the cluster or a node"
        )
    return path


def _address_for_nodes() -> str:
    """The address of this machine that leads to the nodes. Raises: SpawnError if Slurm does not answer."""
    found = []
    for node in list(dict.fromkeys(ask("sinfo", "-h", "-N", "-o", "%o").split()))[:8]:
        with contextlib.suppress(OSError):
            found.append(address_towards(node))
    far = [address for address in found if not address.startswith("127.") and address != "::1"]
    return next(iter(far or found), own_address())
