"""``meshbook run``: a script that was written for torchrun, on ranks that live for this command."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshbook.cli import INTERRUPTED, Subparsers
from meshbook.errors import CallFailed, CallInterrupted, Failure, FailureKind, MeshError, ScriptExit, UsageError
from meshbook.errors.failures import without_colours
from meshbook.system.devices import count_cuda_devices

if TYPE_CHECKING:
    from meshbook.calls.call_future import CellRun
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook.shell.scripts import Script

LEASE_S = "30"
"""The time for which ranks wait for another controller when this one was killed: none comes."""
OTHERS_S = 10.0
"""The time for which ranks go on when another has failed, before they are interrupted."""
TERMINATED = 143
"""The exit code of SIGTERM."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of ``run``."""
    parser = subparsers.add_parser("run", help="run a script of torchrun", allow_abbrev=False)
    parser.add_argument("--hosts", type=int, metavar="N", help="the machines (default: this one)")
    parser.add_argument("--gpus", type=int, metavar="N", help="the ranks of each (default: one for each GPU, or one)")
    parser.add_argument("--on", default="local", metavar="ENGINE", help="who starts the hosts: ssh:HOST,.., slurm, ...")
    parser.add_argument("--options", default="", metavar="TEXT", help="the engine's own: '--partition gpu'")
    parser.add_argument("--python", metavar="PATH", help="the interpreter on the hosts")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default cuda where each rank has one")
    parser.add_argument("--timeout", type=float, metavar="S", help="interrupt the script after so many seconds")
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT is the name of a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS]", help="the program")


def main(args: argparse.Namespace) -> int:
    """Run the script to its end; returns its exit code, 1 where it raised, or 130 for Ctrl-C.

    Raises: UsageError, SpawnError.
    """
    from meshbook.shell.scripts import read_script

    try:
        script = read_script([*(["-m"] if args.is_module else []), *args.script])
    except SyntaxError as error:
        raise UsageError(f"{error.filename}, line {error.lineno}: {error.msg}") from None
    os.environ.setdefault("MESHBOOK_LEASE_S", LEASE_S)
    with _ended_by_sigterm():
        try:
            procs = _spawn(args)
        except KeyboardInterrupt:
            return INTERRUPTED
        return _run(procs, script, args.timeout)


def _spawn(args: argparse.Namespace) -> ProcMesh:
    from meshbook.launchers.registry import Asked, count_hosts, parse
    from meshbook.mesh.driven import start_hosts, this_host

    ranks = args.gpus if args.gpus is not None else count_cuda_devices() or 1
    if ranks < 1 or (args.hosts is not None and args.hosts < 1):
        raise UsageError("--gpus and --hosts are numbers from 1 on.")
    asked = Asked(
        python=args.python,
        options=tuple(shlex.split(args.options)),
        device=args.device,
        count_ranks=lambda: ranks,
    )
    launcher = parse(args.on, asked)
    hosts = count_hosts(launcher, args.hosts)
    place = this_host() if hosts is None else start_hosts({"hosts": hosts}, launcher)
    return place.spawn_procs({"gpus": ranks}, device=args.device, owns_hosts=hosts is not None)


def _run(procs: ProcMesh, script: Script, timeout_s: float | None) -> int:
    from meshbook.calls.output import ConsoleOutput, OutputEvent, RankDone
    from meshbook.mesh.rank_calls import start_cell

    console, failed = ConsoleOutput(), threading.Event()

    def on_output(event: OutputEvent) -> None:
        if isinstance(event, RankDone) and event.failure is not None:
            failed.set()
        console(event)

    cell = start_cell(procs, script, on_output=on_output)
    threading.Thread(target=_end_others, args=(cell, failed), daemon=True).start()
    try:
        cell.future.get(timeout_s)
    except CallInterrupted:
        return INTERRUPTED
    except CallFailed as error:
        text = "\n".join(error._render_traceback_())
        print(text if sys.stderr.isatty() else without_colours(text), file=sys.stderr)
        raised = [each for each in error.failures if each.kind is FailureKind.RAISED]
        return _exit_code((raised or error.failures)[0])
    except MeshError as error:
        cell.cancel()
        print(error, file=sys.stderr)
        return 1
    return 0


def _exit_code(failure: Failure) -> int:
    try:
        error = failure.load()
    except Exception:  # its class is not here
        return 1
    return (error.code & 0xFF) or 1 if isinstance(error, ScriptExit) else 1


def _end_others(cell: CellRun, failed: threading.Event) -> None:
    """Interrupt the ranks that go on though another has failed, as torchrun ends them."""
    failed.wait()
    if not cell.future.wait(OTHERS_S):
        cell.cancel()


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end this process in order inside of the block, so that its ranks end too."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
