"""Commands on hosts: `exec_command`, Monarch's name for it.

exec_command(state.trainers, ["nvidia-smi", "-L"]).get()       # the largest exit code; what they print is shown
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from meshbook.actor import Actor, context, endpoint
from meshbook.concurrency.background import run_in_background
from meshbook.concurrency.future import Future
from meshbook.errors import UsageError
from meshbook.mesh.host_mesh import HostMesh
from meshbook.mesh.proc_mesh import ProcMesh

SUBDIR = "$SUBDIR"
"""In the folder for output: stands for the place of the rank, as in ``hosts_0``."""


class RunningCommand(Future[int]):
    """The largest exit code of a command that runs. An interrupt of `get` ends the command everywhere."""

    def get(self, timeout: float | None = None) -> int:
        """Wait until all have ended. Raises: SpawnError, ActorError, CallTimeout; KeyboardInterrupt."""
        try:
            return super().get(timeout)
        except KeyboardInterrupt:
            self.cancel()
            raise


class CommandRunner(Actor):
    """Runs a command in its process, whose output is shown as the rank's own is."""

    @endpoint
    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        workdir: str | None,
        client_cwd: str,
        output_dir: str | None,
    ) -> int:
        """Returns the exit code; that of a command which a signal has ended is above 128, as shells have it."""
        rank = context().actor_instance.rank
        own = {f"MONARCH_RANK_{axis}": str(index) for axis, index in rank.items()}
        own |= {f"MONARCH_SIZE_{axis}": str(size) for axis, size in rank.extent.items()}
        folder = workdir or (client_cwd if os.path.isdir(client_cwd) else None)
        python = command[0] == "-m" or command[0].endswith(".py")
        full = [*([sys.executable] if python else []), *command]
        outputs: list[IO[bytes]] = []
        if output_dir is not None:
            place = "_".join(f"{axis}_{index}" for axis, index in rank.items()) or "rank_0"  # one host has no axes
            there = Path(output_dir.replace(SUBDIR, place))
            there.mkdir(parents=True, exist_ok=True)
            outputs = [(there / name).open("wb") for name in ("stdout.txt", "stderr.txt")]
        streams: dict[str, Any] = dict(zip(("stdout", "stderr"), outputs, strict=False))
        try:
            process = subprocess.Popen(
                full, env={**os.environ, **own, **env}, cwd=folder, stdin=subprocess.DEVNULL, **streams
            )
        finally:
            for output in outputs:
                output.close()
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            raise
        return 128 - code if code < 0 else code


def exec_command(
    host_mesh: HostMesh,
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    output_dir: str | None = None,
    rank: int | None = None,
    point: Mapping[str, int] | None = None,
    per_host: Mapping[str, int] | None = None,
) -> RunningCommand:
    """Run a command on every host, in processes of its own, and show what it prints; begins at once.

    cmd: the program and its arguments; what ends with ``.py``, or ``-m`` and a module, runs in the hosts' Python.
    workdir: by default the folder here, where there is one of its name. output_dir: there stdout.txt and stderr.txt
    get the output, in place of being shown. rank, point: on one host alone. per_host: so many processes on each.
    Raises: UsageError for both rank and point, and where there is nothing to run.
    """
    if isinstance(cmd, str) or not cmd:
        raise UsageError('a command is a list, as in ["nvidia-smi", "-L"].')
    if rank is not None and point is not None:
        raise UsageError("give rank= or point=, not both.")
    hosts = host_mesh
    if point is not None:
        hosts = host_mesh.slice(**point)
    elif rank is not None:
        hosts = host_mesh.flatten("rank").slice(rank=rank) if len(host_mesh.sizes) else host_mesh
    begun: list[ProcMesh] = []
    running = RunningCommand(on_cancel=lambda: [procs.stop() for procs in begun] and None)
    arguments = list(map(str, cmd)), dict(env or {}), workdir, os.getcwd(), output_dir

    def work() -> None:
        try:
            with hosts.spawn_procs(per_host, torch=False, group=False) as procs:
                begun.append(procs)
                codes = procs.spawn("commands", CommandRunner).run.call(*arguments).get()
        except BaseException as error:
            running.set_exception(error)
        else:
            running.set_result(max(codes.values()))

    run_in_background(work)
    return running
