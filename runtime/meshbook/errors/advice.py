"""The advice in errors, as the user of a front end types it: Python calls in a script, magics in a notebook.

Errors advise a command. Its name depends on the front end, which replaces the table (`set_advice`); ranks get
it when they start, and again when another process takes their mesh over, since some texts are made there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Advice(NamedTuple):
    """The commands and calls by their purpose. Names in braces are filled in by `str.format`."""

    heal: str = "mesh.heal()"
    heal_call: str = "mesh.heal()"
    """The same, where an error of a Python call says it."""
    rebuild: str = "mesh.rebuild_groups()"
    shrink: str = "mesh.shrink()"
    change: str = "mesh.{verb}({sizes})"
    respawn: str = "mesh.respawn({list})"
    """The command for ``ranks`` as a person writes them, and as a ``list``."""
    insist: str = "mesh.respawn({list}, force=True)"
    spawn: str = 'this_host().spawn_procs({"gpus": 4})'
    spawn_call: str = "this_host().spawn_procs(...)"
    spawn_hosts: str = 'start_hosts({"hosts": 3}, launcher).spawn_procs({"gpus": 4})'
    grow_hosts: str = "mesh.grow(launcher, hosts=1)"
    heal_elsewhere: str = "mesh.heal(launcher=launcher)"
    """The ways in which another launcher adds hosts, and replaces lost ones."""
    shared_network: str = 'spawn with env={"MESHBOOK_INTERFACE": NETWORK} that they share'
    no_groups: str = "with group=False"
    stop: str = "mesh.stop()"
    detach: str = "meshbook.detach()"
    whole: str = "base()"
    """The call that gives the whole mesh in place of a part."""
    fresh_view: str = "slice that"
    """The thing to do with the whole mesh for a view of its ranks as they are now."""
    interrupt: str = "mesh.interrupt()"
    wait: str = "get() of their calls"
    stacks: str = "mesh.stacks()"
    stacks_call: str = "mesh.stacks()"
    stacks_of: str = "mesh.stacks()[{rank}]"
    logs: str = "mesh.log_paths()"
    prompt: str = "get() of the call"
    postmortem: str = "mesh.postmortem()"
    free: str = "mesh.free()"
    pull: str = "mesh.pull(NAME)"
    pip: str = "a shell on its hosts: pip"
    """The command that runs pip, without its arguments."""
    ask: str = "Ask where the mesh is driven, and send the answer with: mesh.push({NAME: answer})"
    cpu: str = 'device="cpu"'
    within: str = "within_s=600"
    invite: str = 'start_hosts({"hosts": 2}, ManualLauncher()) of meshbook.launchers.manual'
    """The command that shows the line by which other machines become hosts."""


class FrontEndWords:
    """The words of this process's front end."""

    def __init__(self) -> None:
        self.use(None)

    def use(self, words: Advice | None, name_cells: Callable[[str], str] = str) -> None:
        """Take the words of another front end; None for those of a script."""
        self._advice, self._name_cells = words or Advice(), name_cells

    def advice(self) -> Advice:
        """Return the table of the front end."""
        return self._advice

    def name_cells(self, text: str) -> str:
        """Return ``text``, that a rank wrote, with the front end's own names for the files of its cells."""
        return self._name_cells(text)


_words = FrontEndWords()
advice, name_cells, set_advice = _words.advice, _words.name_cells, _words.use
