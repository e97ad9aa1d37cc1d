"""Debuggers on ranks: pdb at a breakpoint, where a rank runs, or at its last exception; and debuggers with a window."""

from __future__ import annotations

import json
import socket

from meshbook.calls.rank_state import LastError
from meshbook.errors import UsageError
from meshbook.formatting import group_ranks, name_ranks
from meshbook.mesh import states
from meshbook.mesh.dap import HOST, TOKEN, prepare
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import ask
from meshbook.mesh.prompt import DebugPrompt
from meshbook_extension.cells.prompt import CallOutput, NotebookTerminal, who_stays, why_no_prompt
from meshbook_extension.commands import Command, on_ranks
from meshbook_extension.notebook.grammar import Arguments, Option
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.targets import choose, one_rank
from meshbook_extension.visual_debugger.target import Debugged, DebugTarget

BREAK_IN_S = 2.0
"""The time that a rank has to come to a line of the user's code, once it was asked to stop."""
OPEN_S = 5.0
"""The time that a post-mortem has to open."""

CAST = Option("--cast", "this command on all of them, without a prompt", str, "CMD")

AT_PROMPT = """\
At the prompt pdb's own commands work, and: rank N, ranks, cast CMD [TARGET], ?prefix, detach, help.
Interrupt ends what the stopped ranks run."""


@on_ranks(
    name="%mesh pdb",
    summary="The prompt of ranks that stopped at a breakpoint; ranks that run are stopped where they are.",
    options=(CAST,),
    examples=("%mesh pdb", "%mesh pdb rank=3", '%mesh pdb --cast "p loss"', '%mesh pdb --cast "p x" rank=0,2'),
    notes=f"""
{AT_PROMPT}
A target whose ranks run and are not stopped: they stop at their next line of your code.""",
)
def pdb(session: Session, arguments: Arguments) -> None:
    procs = session.target(arguments.words, arguments.pairs)
    cast = arguments.text(CAST.name)
    stopped = states.stopped(procs)
    if cast is not None:
        if not stopped:
            raise UsageError(f"{_none_of(procs)} stopped at a prompt. Stop them where they are: %mesh pdb rank=0")
        try:
            _prompt(session, procs).cast(cast)
        finally:
            # nobody stays with them: their next stop is news
            states.stopped_ranks(procs).stepping.difference_update(procs.ranks)
        return
    _check_person(session)
    if not stopped and not arguments.words and not arguments.pairs:
        raise UsageError(
            "no rank is stopped at a prompt.\n"
            "  stop one that runs: %mesh pdb rank=0    at a line: breakpoint()    after an error: %mesh postmortem"
        )
    if not stopped and not _break_in(procs):
        return
    states.stopped_ranks(procs).left.difference_update(procs.ranks)
    try:
        detached = _prompt(session, procs).attend(lambda: False)
    except KeyboardInterrupt:
        ranks = list(states.stopped_ranks(procs).of(procs.ranks)) or list(states.busy(procs)) or procs.ranks
        raise procs.select(ranks).interrupt() from None
    if detached:
        print(who_stays(procs))


def _break_in(procs: ProcMesh) -> bool:
    """Have busy ranks stop at their next line; returns whether any did."""
    busy = states.busy(procs)
    if not busy:
        raise UsageError(f"{_none_of(procs)} running anything. A breakpoint() in a cell stops them there.")
    view = procs.select(busy)
    ask(view, object, "pdb_break_in")
    states.stopped_ranks(procs).wait_for(
        lambda: len(states.stopped_ranks(procs).of(busy)) == len(set(busy) & set(states.busy(procs))), BREAK_IN_S
    )
    late = [rank for rank in busy if rank not in states.stopped_ranks(procs).of(busy) and rank in states.busy(procs)]
    if late:
        places = group_ranks(states.where(procs.select(late)).items())
        lines = [f"{name_ranks(ranks)} came to no line of your code: {place}" for place, ranks in places.items()]
        again = "it stops" if len(late) == 1 else "they stop"
        print("\n".join([*lines, f"  {again} at the next one; the prompt then: %mesh pdb"]))
    return bool(states.stopped_ranks(procs).of(busy))


def _prompt(session: Session, procs: ProcMesh, *, post_mortem: bool = False) -> DebugPrompt:
    terminal = NotebookTerminal(session.shell, session.part(CallOutput).output(procs))
    return DebugPrompt(procs, terminal, choose, post_mortem=post_mortem)


def _check_person(session: Session) -> None:
    if why := why_no_prompt(session.shell):
        raise UsageError(f'{why}.\n  without a prompt: %mesh pdb --cast "p x"    %mesh postmortem --cast "p x"')


def _none_of(procs: ProcMesh) -> str:
    ranks = procs.ranks
    return f"rank {ranks[0]} is not" if len(ranks) == 1 else f"none of {name_ranks(ranks)} is"


@Command(
    name="%mesh postmortem",
    summary="pdb on the frames of a rank's last exception; by default of the rank that failed first.",
    words="[RANK]",
    options=(CAST,),
    examples=("%mesh postmortem", "%mesh postmortem 1", '%mesh postmortem --cast "p x"'),
    notes=f"""
It needs no breakpoint. The frames are kept until the rank's next exception.
Other ranks that raised in the same call are there too: rank N goes to one, cast asks them all. q ends it for all.
{AT_PROMPT}""",
)
def postmortem(session: Session, arguments: Arguments) -> None:
    """Open prompts on the rank and on the ranks that failed with it, until the person quits."""
    procs = session.mesh().base()
    cast = arguments.text(CAST.name)
    if cast is None:
        _check_person(session)
    chosen, ranks = _who_failed(procs, arguments.words)
    view = procs.select(ranks)
    future = view.postmortem()
    states.stopped_ranks(view).wait_for(
        lambda: future.done() or len(states.stopped_ranks(view).of(ranks)) == len(ranks), OPEN_S
    )
    prompt = _prompt(session, view, post_mortem=True)
    try:
        if cast is not None:
            prompt.cast(cast)
        elif prompt.attend(future.done, first=chosen):
            print(who_stays(view))
            return
        prompt.end()
        future.get(OPEN_S)
    except KeyboardInterrupt:
        raise future.interrupt() from None


def _who_failed(procs: ProcMesh, words: tuple[str, ...]) -> tuple[int, list[int]]:
    """Return the rank to look at first, and all ranks that have an exception of the same call, itself included."""
    errors = {rank: error for rank, error in ask(procs, LastError, "last_error").items() if error.has_frames}
    busy = set(states.busy(procs))
    if words:
        chosen = one_rank(procs, words[0])
        if chosen not in errors:
            have = f"{name_ranks(errors)} {'has' if len(errors) == 1 else 'have'}" if errors else "no rank has"
            raise UsageError(f"rank {chosen} has no exception to look at; {have} one.")
    elif not errors:
        raise UsageError("no rank has an exception to look at: none has raised anything yet, or it was freed.")
    else:
        chosen = _first_cause(errors)
    if chosen in busy:
        raise UsageError(
            f"rank {chosen} is busy: {states.where(procs.select([chosen]))[chosen]}.\n"
            f"  look at that: %mesh pdb rank={chosen}    end it: %mesh interrupt rank={chosen}"
        )
    same = [rank for rank, error in errors.items() if error.call == errors[chosen].call and rank not in busy]
    return chosen, sorted(same)


def _first_cause(errors: dict[int, LastError]) -> int:
    """Return the rank that failed first in the last call in which a rank failed by itself."""
    causes = {rank: error for rank, error in errors.items() if not error.freed} or errors
    last = max(error.call for error in causes.values())
    return max((rank for rank in causes if causes[rank].call == last), key=lambda rank: causes[rank].ago_s)


@Command(
    name="%mesh debug",
    summary="JupyterLab's debugger panel, or VS Code, on one rank: breakpoints, variables, steps.",
    words="[RANK]",
    options=(Option("--off", "the panel debugs the notebook's own process again"),),
    examples=("%mesh debug 1", "%mesh debug --off"),
    notes="""
The panel then stops in %%mesh cells on that rank; turn it on with the bug button of the notebook's toolbar.
The launch configuration for VS Code holds a token that is valid until the next %mesh debug: give it to nobody.
Other ranks go on meanwhile, until they need the one that has stopped. An interrupt ends the cell as always.""",
)
def debug(session: Session, arguments: Arguments) -> None:
    if arguments.flag("--off"):
        if (target := session.part(Debugged).end()) is None:
            print("no rank is under the debugger")
        else:
            (rank,) = target.rank.ranks
            print(f"rank {rank} is no longer under the debugger; the panel debugs the notebook's own process")
        return
    if not arguments.words:
        raise arguments.grammar.refuse("say which rank, by its number.")
    mesh = session.mesh().base()
    procs = mesh.select([one_rank(mesh, arguments.words[0])])
    prepare(procs)
    print(_describe(session.part(Debugged).begin(procs)))


def _describe(target: DebugTarget) -> str:
    number, port = target.rank.ranks[0], target.door.port
    launch: dict[str, object] = {
        "name": f"Meshbook rank {number}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": HOST, "port": port},
        "justMyCode": False,
        TOKEN: target.door.token,
    }
    if target.switch is None:
        panel = "  no debugger panel here: this kernel has none, or misses debugpy"
    elif target.switch.is_notebooks:
        panel = "  the panel is on for the notebook's own process: press its bug button twice to bring it to the rank"
    elif target.is_attached:
        panel = "  the debugger panel is there, with its breakpoints"
    else:
        panel = "  press the bug button in the notebook's toolbar, set breakpoints in %%mesh cells, run them"
    return "\n".join(
        [
            f"rank {number} ({target.rank.status()[0].host}) can be debugged now; end it: %mesh debug --off",
            panel,
            f"  VS Code: attach at {HOST}:{port} with these lines in launch.json; the token is for this session only",
            "    {",
            *(f"      {json.dumps(name)}: {json.dumps(value)}," for name, value in launch.items()),
            "    }",
            f"  from another machine first: ssh -L {port}:{HOST}:{port} {socket.gethostname()}",
        ]
    )
