"""The commands that look at meshes and end them: list, stop, logs, stacks.

The folder of a session is enough for the list and for logs. Stacks, and the end of a mesh, are asked of the process
that drives it, by a visit (`meshbook.wire.visits`). A mesh that waits is attached, to be stopped. Where neither
answers, ``stop --force`` ends the recorded processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshbook.cli import FAILED, Subparsers
from meshbook.errors import AttachError, MeshError, ProtocolError, UsageError
from meshbook.formatting import Table, format_bytes, format_sizes, name_ranks
from meshbook.sessions.folder import SavedMesh, read_state
from meshbook.sessions.listing import SavedSession, sessions
from meshbook.sessions.words import (
    describe,
    describe_age,
    describe_holder,
    find_session,
    names_of,
    notebook_of,
    owner_of,
)
from meshbook.system.exits import end_process, log_tail
from meshbook.system.user_folders import log_base
from meshbook.wire.visits import VisitAnswer, VisitQuestion, pay_visit

NO_MESH = "no mesh on this machine. Start one in a notebook: %mesh spawn gpus=4"
ANSWER_S, NATIVE_ANSWER_S = 15.0, 40.0
"""The time that the process which drives a mesh has to answer; native stacks take longer."""
END_S = 5.0
"""The time that an agent has to end its ranks and itself, before it is killed."""
LINES, LINES_BEFORE = 20, 5
"""The lines of each rank that are shown; those before the ones that are followed."""
LOOK_S, PIECE_BYTES = 0.2, 64 << 10
"""The pause between two looks at logs, and the most of one log that a look brings."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the parsers of the commands."""

    def add(name: str, about: str, nargs: str | None = None) -> argparse.ArgumentParser:
        parser = subparsers.add_parser(name, description=about, allow_abbrev=False)
        parser.add_argument("--json", action="store_true", help="for programs")
        if name != "list":
            parser.add_argument("name", metavar="NAME", nargs=nargs, help="a mesh, or the id of its session")
        return parser

    listing = add("list", "All meshes of yours on this machine, and who has them.")
    listing.add_argument("--jobs", action="store_true", help="your jobs too, as engines (Slurm, ...) list them")
    listing.add_argument("--names", action="store_true", help="the names alone, a line each")
    stop = add("stop", "End the processes of a mesh, or with the id of a session those of all its meshes.")
    stop.add_argument("--yes", action="store_true", help="do not ask, though a notebook has the mesh")
    stop.add_argument(
        "--force", action="store_true", help="where none answers: end the recorded processes of its whole session"
    )
    logs = add("logs", "The last lines that each rank has written, from the logs on this machine.", "?")
    logs.add_argument("--rank", type=int, action="append", metavar="RANK", help="this rank only; may be given again")
    logs.add_argument("-n", type=int, metavar="N", help=f"so many lines of each ({LINES})")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with the text that ranks write, until Ctrl-C")
    logs.add_argument("--grep", metavar="TEXT", default="", help="only lines with this text")
    stacks = add("stacks", "Where each rank is, busy or blocked; equal stacks once; who holds the others up.", "?")
    stacks.add_argument("--all-frames", action="store_true", help="with the frames of libraries and of the runtime")
    stacks.add_argument("--all-threads", action="store_true", help="not only the main thread of each rank")
    stacks.add_argument("--native", action="store_true", help="with the frames of native code, read by py-spy")


def main(args: argparse.Namespace) -> int:
    """Run one of the commands. Raises: MeshError, OSError."""
    commands = {"list": list_meshes, "stop": stop, "logs": logs, "stacks": stacks}
    return commands[args.command](args)


# ---- list -----------------------------------------------------------------------------------------------------------


def list_meshes(args: argparse.Namespace) -> int:
    """Show the meshes of all sessions."""
    known = sessions()
    if args.json:
        _print_json([_plain(each, mesh) for each in known for mesh in each.meshes])
        return 0
    if args.names:
        print("\n".join(name for each in known for name in names_of(each)))
        return 0
    rows = [
        [mesh.name, format_sizes(mesh.sizes), describe_age(mesh), describe_holder(each), each.id]
        for each in known
        for mesh in each.meshes
    ]
    print(Table(["mesh", "axes", "age", "who has it", "session"], rows) if rows else NO_MESH)
    if args.jobs:
        from meshbook.launchers.engines.commands import job_lists

        sys.stdout.flush()
        for line in job_lists():
            print(line, flush=True)
    return 0


def _plain(saved: SavedSession, mesh: SavedMesh) -> dict[str, Any]:
    waits_s = None if saved.owner_pid is not None else saved.lease_s - (saved.waits_s or 0.0)
    owner = {"session": saved.id, "owner_pid": saved.owner_pid, "notebook": notebook_of(saved), "waits_s": waits_s}
    hosts = len(set(mesh.hosts))
    return {"mesh": mesh.name, "axes": mesh.sizes, "hosts": hosts, "jobs": mesh.jobs, "began": mesh.began, **owner}


# ---- stop -----------------------------------------------------------------------------------------------------------


def stop(args: argparse.Namespace) -> int:
    """End a mesh, or all meshes of a session."""
    saved = find_session(args.name)
    names = names_of(saved) if args.force or args.name == saved.id else [args.name]
    if saved.owner_pid is not None and not args.yes:
        holder = f"{', '.join(names)} of {owner_of(saved)}, which is alive"
        if not confirm(f"Stop {holder}?", f"this is {holder}. Stop it all the same: meshbook stop {args.name} --yes"):
            print("nothing was stopped")
            return FAILED
    if args.force:
        _end_processes(saved)
    elif saved.owner_pid is not None:
        for name in names:
            otherwise = f"end the processes of its session: meshbook stop {args.name} --force"
            ask_owner(saved, VisitQuestion("stop", name), ANSWER_S, otherwise)
    elif len(names) == len(saved.meshes):
        _stop_waiting(saved, args.name)
    else:
        raise MeshError(
            f'mesh "{args.name}" waits together with others, {describe(saved)}.\n'
            f"  stop all of them: meshbook stop {saved.id}    go on with them: meshbook attach {args.name}"
        )
    if args.json:
        _print_json({"stopped": names, "session": saved.id})
    else:
        print("\n".join(f'mesh "{name}" stopped' for name in names))
    return 0


def _stop_waiting(saved: SavedSession, name: str) -> None:
    """Become the controller of a session, and end it in order: agents, ranks, jobs of engines."""
    from meshbook.mesh.driven import attach, shutdown

    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # the text that ranks have kept
            for mesh in attach(saved):
                mesh.stop()
            shutdown()
    except AttachError as error:
        raise MeshError(f"{error}\n  end its processes: meshbook stop {name} --force") from error


def _end_processes(saved: SavedSession) -> None:
    """End the agents of a session by their recorded pids and start times; their ranks end with them."""
    state = read_state(saved.path)
    hosts = state.hosts.values() if state is not None else ()
    living = [host for host in hosts if host.runs]
    for host in living:
        with contextlib.suppress(ProcessLookupError):
            os.kill(host.pid, signal.SIGTERM)
    for host in living:
        end_process(host.pid, host.started, END_S)
    if far := [host.name or host.launcher.engine for host in hosts if host.runs is None]:
        print(f"hosts elsewhere end by their lease, or with their jobs: {', '.join(far)}", file=sys.stderr)


def ask_owner(saved: SavedSession, visit: VisitQuestion, timeout_s: float, otherwise: str) -> VisitAnswer:
    """Ask the process that drives a session. otherwise: the way out if it does not answer. Raises: MeshError."""
    try:
        return pay_visit(saved.path, visit, timeout_s)
    except (OSError, ProtocolError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise MeshError(f"{owner_of(saved)} does not answer: {why}.\n  {otherwise}") from error


def confirm(question: str, otherwise: str) -> bool:
    """Ask a person. Raises: MeshError with the text ``otherwise`` where there is no terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise MeshError(otherwise)
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


# ---- logs and stacks ------------------------------------------------------------------------------------------------


def logs(args: argparse.Namespace) -> int:
    """Show the logs of a mesh's ranks."""
    if args.json and args.follow:
        raise UsageError("--json shows what is there; leave --follow out.")
    saved, id, _ = _find_mesh(args.name)
    found = {
        int(name[1]): path
        for path in (log_base() / saved.id).glob(f"*-{id}/rank-*.log")
        if (name := re.fullmatch(r"rank-(\d+)\.log", path.name))
    }
    chosen = sorted(found) if args.rank is None else args.rank
    paths = {rank: found[rank] for rank in chosen if rank in found}
    if missing := [rank for rank in chosen if rank not in found]:
        where = f"no log of {name_ranks(missing)} is on this machine; look on its host, or in the notebook: %mesh logs"
        if not paths:
            raise MeshError(where)
        print(where, file=sys.stderr)
    if args.follow:
        return _follow(saved, id, paths, LINES_BEFORE if args.n is None else args.n, args.grep)
    lines = {rank: log_tail(path, LINES if args.n is None else args.n, 0, args.grep) for rank, path in paths.items()}
    if args.json:
        _print_json([{"rank": rank, "path": path, "lines": lines[rank].splitlines()} for rank, path in paths.items()])
        return 0
    for rank, path in paths.items():
        print(f"[{rank}] {path}")
        if lines[rank]:
            print(lines[rank].rstrip("\n"))
    return 0


def _follow(saved: SavedSession, id: int, paths: Mapping[int, Path], lines: int, wanted: str) -> int:
    """Show new lines until the mesh ends, each behind the number of its rank."""
    from meshbook.agent.rank_log import read_on
    from meshbook.wire.messages import FROM_THE_END, ReadOn

    offsets, begun = dict.fromkeys(paths, FROM_THE_END), dict.fromkeys(paths, b"")
    while True:
        state = read_state(saved.path)
        is_over = state is None or id not in state.meshes
        for piece in read_on(paths, ReadOn(tuple(offsets.items()), lines, PIECE_BYTES)):
            offsets[piece.rank] = piece.end
            if piece.skipped_bytes:
                print(f"[{piece.rank}] {format_bytes(piece.skipped_bytes)} left out, as it came too fast")
            *whole, begun[piece.rank] = (begun[piece.rank] + piece.data).split(b"\n")
            texts = [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="backslashreplace") for line in whole]
            print("".join(f"[{piece.rank}] {text}\n" for text in texts if wanted in text), end="", flush=True)
        if is_over:
            print("the mesh has ended")
            return 0
        time.sleep(LOOK_S)


def stacks(args: argparse.Namespace) -> int:
    """Show the stacks of a mesh's ranks."""
    saved, _, mesh = _find_mesh(args.name)
    if saved.owner_pid is None:
        raise MeshError(
            f'mesh "{mesh.name}" waits, and only the process that drives a mesh asks its ranks.\n'
            f"  drive it: meshbook attach {mesh.name}, then %mesh stacks"
        )
    visit = VisitQuestion("stacks", mesh.name, args.all_frames, args.all_threads, args.native)
    otherwise = f"its own stack: py-spy dump --pid {saved.owner_pid}"
    answer = ask_owner(saved, visit, NATIVE_ANSWER_S if args.native else ANSWER_S, otherwise)
    if args.json:
        _print_json(answer.data)
    else:
        print(answer.text)
    return 0


def _find_mesh(name: str | None) -> tuple[SavedSession, int, SavedMesh]:
    """Return a mesh with its session and number; without a name the only one. Raises: MeshError, UsageError."""
    known = sessions() if name is None else [find_session(name)]
    if not known:
        raise MeshError(NO_MESH)
    states = [(saved, state) for saved in known if (state := read_state(saved.path)) is not None]
    found = [
        (saved, id, mesh)
        for saved, state in states
        for id, mesh in state.meshes.items()
        if name in (None, saved.id, mesh.name)
    ]
    if not found:
        raise MeshError("the mesh has ended meanwhile")
    if len(found) > 1:
        raise UsageError(f"say which mesh: {', '.join(mesh.name for _, _, mesh in found)}.")
    return found[0]


def _print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode())
