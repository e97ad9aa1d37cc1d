"""What a rank's process is given before it runs calls: variables, folder, path, threads, random state, modules."""

from __future__ import annotations

import os
import random
import sys
from typing import TYPE_CHECKING

from meshbook.actor.proc_ref import ask_controller
from meshbook.errors import MeshError
from meshbook.errors.advice import set_advice
from meshbook.system.binding import bind
from meshbook.wire import messages as wire

if TYPE_CHECKING:
    from meshbook.workspace.local_modules import FoundModules

ASK_S = 20.0
"""How long a module may take to come from the notebook."""


def enter_environment(begin: wire.Begin) -> None:
    """Be where the agent says, with what it gives. Raises: whatever modules raise that are to be there."""
    if not begin.command.inherits:
        os.environb.clear()
    os.environb.update(begin.environment)
    for name in (name for name, value in begin.command.environment.items() if value is None):
        os.environ.pop(name, None)
    if begin.binding:
        bind(begin.binding)
    set_advice(begin.advice)
    if begin.cwd:
        try:
            os.chdir(begin.cwd)
        except OSError as error:
            print(f"cannot enter the notebook's folder: {error}", file=sys.stderr)
    sys.path[:0] = [path for entry in begin.sys_path if (path := os.fsdecode(entry)) not in sys.path]
    sys.argv = ["meshbook-worker"]
    if (torch := sys.modules.get("torch")) is not None:
        threads = begin.identity.threads
        torch.set_num_threads(min(threads, len(os.sched_getaffinity(0))) if begin.binding else threads)
    for module in begin.preload:
        __import__(module)


def ask_for_module(name: str) -> FoundModules | None:
    """The notebook's own module of this name, which is not on this machine. Raises: ModuleNotFoundError."""
    try:
        found: FoundModules | None = ask_controller("find_module", (name,), {}, "the workspace").get(ASK_S)
    except (MeshError, TimeoutError) as error:
        raise ModuleNotFoundError(
            f"No module named '{name}' here, and the notebook cannot be asked: {error}", name=name
        ) from error
    return found


def seed() -> None:
    """Forks share the template's random state; each rank needs its own."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None and "numpy.random" in sys.modules:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is None:
        return
    if torch.backends.cuda.is_built():
        torch.seed()
    else:
        torch.default_generator.seed()  # for devices torch.seed() keeps stacks: 2 ms and 1.3 MB of each rank
