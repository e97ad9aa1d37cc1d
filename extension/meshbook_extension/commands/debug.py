"""``%mesh debug``: a debugger with a window, on a rank."""

from __future__ import annotations

import json
import socket

from meshbook.mesh.dap_client import prepare
from meshbook.mesh.dap_listener import HOST, TOKEN
from meshbook_extension.commands import Command
from meshbook_extension.notebook.grammar import Arguments, Option
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.targets import one_rank
from meshbook_extension.visual_debugger.target import Debugged, DebugTarget


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
    """Point the debuggers at a rank, or away from it."""
    if arguments.flag("--off"):
        print(_stop(session))
        return
    if not arguments.words:
        raise arguments.grammar.refuse("say which rank, by its number.")
    mesh = session.mesh().base()
    rank = mesh.select([one_rank(mesh, arguments.words[0])])
    prepare(rank)
    print(_describe(session.part(Debugged).begin(rank)))


def _stop(session: Session) -> str:
    target = session.part(Debugged).end()
    if target is None:
        return "no rank is under the debugger"
    return f"rank {target.rank.ranks[0]} is no longer under the debugger; the panel debugs the notebook's own process"


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
