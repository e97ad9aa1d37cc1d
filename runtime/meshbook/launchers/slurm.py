"""Host agents on the nodes of a Slurm cluster: an allocation, and in it one srun that starts an agent on each node.

    controller ──stdin: the tickets──> salloc ──> sh ──> srun ════> slurmstepd of each node ──> sh ──> agent
        '── own address: port <══════════════════════════ network ════════════════════════════════════════'

salloc waits in the queue; its command runs here. srun passes its stdin on to all tasks, and each agent takes the ticket
of its number: no secret is on a command line or in an environment. When srun has ended, sh holds the allocation as long
as the controller or another step is there, so that a lost host comes back on its node by a step of its own
(``srun --jobid --overlap``). In an allocation that is there already, as the environment says, srun runs by itself.
Where the allocation or the node has gone another allocation takes its place, and hosts that come later have their own.

All of them outlive the controller, as agents do. Their output goes to a file, from which this controller and the next
one read all that they know of them (`meshbook.launchers.engines.slurm_jobs`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.agent_start import agent_script
from meshbook.launchers.base import EngineLauncher, LaunchedHost, Launcher
from meshbook.launchers.engines.clients import ON, ClientHost
from meshbook.launchers.engines.slurm_jobs import (
    JOB_NAME,
    PIPE_BYTES,
    Allocation,
    SlurmClient,
    address_for_nodes,
    allocation_of,
    describe_nodes,
)
from meshbook.launchers.registry import Asked
from meshbook.sessions.folder import SavedHost, SavedLauncher
from meshbook.system.interfaces import in_endpoint
from meshbook.wire.ticket import Ticket, encode_tickets

_SRUN = (
    "srun", "--label", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--overlap", "--cpu-bind=none",
    "--ntasks-per-node=1",
)  # fmt: skip
"""Its options: a task that ends lets the others live on, and several steps share a node."""

_HOLD = """
kill "$MESHBOOK_GUARD"
echo "meshbook: job $SLURM_JOB_ID" >&2
"$@"
echo "meshbook: srun ended $?" >&2
cat >/dev/null
while [ -n "$(squeue -h -s -j "$SLURM_JOB_ID" -o %i)" ]; do sleep 2; done
"""
"""The command of salloc; ``cat`` returns when there is no controller any more."""

_NOT_FOR_US = ("-N", "--nodes", "-n", "--ntasks", "--ntasks-per-node")


class SlurmLauncher(EngineLauncher["SlurmHost"]):
    """An agent on each node of an allocation: of the one that this process runs in, else of its own."""

    name = "slurm"

    def __init__(self, *, python: str | None = None, options: Sequence[str] = ()) -> None:
        """options: of salloc; of srun where there is an allocation already.

        python: the interpreter there; by default the path of our own where there is one, else ``python3``.
        Raises: UsageError.
        """
        super().__init__(python, options)
        self._apart: tuple[str, ...] = ()
        for option in self.options:
            if option.partition("=")[0] in _NOT_FOR_US:
                raise UsageError(f"Slurm cannot be given {option} here: hosts=N says how many nodes, an agent on each.")

    @property
    def transport(self) -> str:
        return f"tcp://{in_endpoint(address_for_nodes())}"

    @property
    def place_is_gone(self) -> bool:
        """Whether Slurm has taken the node, or the allocation, which was ours."""
        place = self._place
        return place is not None and place.allocation.is_ours and place.node not in place.allocation.nodes()

    def for_more(self, beside: Sequence[LaunchedHost]) -> SlurmLauncher:
        """Return one with another allocation; in the notebook's own it leaves out nodes that have hosts of these."""
        nodes = sorted({host.node for host in beside if isinstance(host, SlurmHost)} - {""})
        more = self.in_place_of(None)
        more._apart = (f"--exclude={','.join(nodes)}",) if nodes else ()
        return more

    def _start(self, tickets: list[Ticket]) -> list[SlurmHost]:
        """Ask for nodes and an agent on each; both come when Slurm has them. Raises: OSError, SpawnError."""
        log = Path(tickets[0].log_dir) / f"agent-{tickets[0].host_id}.log"
        if len(encode_tickets(tickets)) > PIPE_BYTES:
            raise UsageError(f"{len(tickets)} nodes are more than one srun gets tickets for; spawn two meshes.")
        count, own_job, node = str(len(tickets)), os.environ.get("SLURM_JOB_ID", ""), ""
        srun = [*_SRUN, f"--nodes={count}", f"--ntasks={count}"]
        agent = ["sh", "-c", f'echo "{ON}$SLURMD_NODENAME" >&2; {agent_script(self.python)}']
        if self._place is not None:
            allocation, node = self._place.allocation, self._place.node
            job = allocation.job
            command = [*srun, f"--jobid={job}", f"--nodelist={node}", *agent]
            if not job or not node:
                raise SpawnError("Slurm has never said on which node the host was; spawn the mesh again")
        else:
            allocation, job = allocation_of(log), own_job
            command = [*srun, f"--jobid={job}", *self.options, *self._apart, *agent]
            if not job:
                allocation.sizes = describe_nodes(len(tickets))
                salloc = ["salloc", "--no-kill", f"--job-name={JOB_NAME}", f"--nodes={count}", "--ntasks-per-node=1"]
                command = [*salloc, *self.options, *self._apart, "sh", "-c", _HOLD, "meshbook", *srun, *agent]
        client = allocation.start(command, tickets, log, job)
        return [SlurmHost(allocation, client, ticket.host_id, task, node) for task, ticket in enumerate(tickets)]


class SlurmHost(ClientHost[SlurmClient]):
    """An agent that is a task of a client. node: the node that it was asked for on, if there is one."""

    def __init__(self, allocation: Allocation, client: SlurmClient, id: str, task: int, node: str) -> None:
        super().__init__(client, id, task=task)
        self.allocation, self._node = allocation, node

    @property
    def node(self) -> str:
        """The node of the agent; empty until it is known."""
        return self._node or self.client.said.nodes.get(self.task, "")

    def save(self, saved: SavedLauncher) -> SavedLauncher:
        log, step = self.allocation.log.name, self.client.log.name
        return msgspec.structs.replace(saved, host=self._node, job=log, step=step, task=self.task)

    def failure(self) -> str | None:
        status = self.client.poll()  # first: when it has ended, the log is whole
        why = self.client.said.why_ended(self.task, self.node, self.client.name, status)
        return f"{why}; {self.allocation.sizes}" if why and self.client.said.is_impossible else why

    @property
    def job(self) -> str:
        return self.allocation.job

    def waits_for(self) -> str:
        return "" if self.failure() else self.allocation.look_at_queue()

    def close(self, timeout_s: float) -> None:
        """Leave the allocation, which ends with its last host; the agent was told before, if it could be reached."""
        self.allocation.leave(self.id, self.client, timeout_s)


def parse(asked: Asked) -> SlurmLauncher:
    return SlurmLauncher(python=asked.python, options=asked.options)


def find(id: str, saved: SavedHost, logs: Path) -> tuple[LaunchedHost, Launcher]:
    launcher = saved.launcher
    allocation = allocation_of(logs / launcher.job)
    client = allocation.find(logs / launcher.step, saved.pid, saved.started)
    host = SlurmHost(allocation, client, id, launcher.task, launcher.host)
    return host, SlurmLauncher(python=launcher.python, options=launcher.options).in_place_of(host)
