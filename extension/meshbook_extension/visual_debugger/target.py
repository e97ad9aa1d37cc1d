"""The rank under `%mesh debug`: a debugger in the place of ipykernel's, and a door for editors.

All of it works on the instance, so a stock kernel that has loaded the extension is served as well as ours.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from meshbook.errors import DebugError
from meshbook.mesh.dap import DebugDoor, DebugTunnel, Message
from meshbook_extension.output.publisher import kernel_of
from meshbook_extension.visual_debugger.panel import RankPanel, rank_name

if TYPE_CHECKING:
    from ipykernel.ipkernel import IPythonKernel

    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook_extension.notebook.session import Session


class DebuggerSwitch:
    """The kernel's debugger, which sends sessions of the panel to a rank or to ipykernel's own debugger."""

    def __init__(self, kernel: IPythonKernel) -> None:
        self._kernel, self._own = kernel, kernel.debugger
        self.panel: RankPanel | None = None

    @classmethod
    def of(cls, kernel: IPythonKernel | None) -> DebuggerSwitch | None:
        """Return the switch of this kernel, put in place at the first call; None for a kernel that cannot debug."""
        debugger = getattr(kernel, "debugger", None)
        if isinstance(debugger, cls):
            return debugger
        if kernel is None or not (hasattr(debugger, "process_request") and hasattr(kernel, "_publish_debug_event")):
            return None
        kernel.debugger = switch = cls(kernel)
        return switch

    def __getattr__(self, name: str) -> object:
        return getattr(self._own, name)

    @property
    def is_notebooks(self) -> bool:
        """Whether the panel debugs the notebook's own process just now."""
        return bool(self._own.is_started)

    def point_at(self, rank: ProcMesh | None) -> None:
        """Send the panel to this rank, with the session that it has on another; with None to the notebook's process.

        Raises: DebugError.
        """
        before = self.panel
        self.panel = None if rank is None else RankPanel(rank, self._kernel._publish_debug_event)
        if before is not None and before.is_started and self.panel is not None:
            self.panel.go_on_from(before)
        elif before is not None:
            before.close()

    async def process_request(self, message: Message) -> Message:
        """Answer a request of the panel."""
        panel = self.panel
        if panel is None or self._own.is_started:
            own: Message = await self._own.process_request(message)
            return own
        return await panel.process_request(message)


class DebugTarget:
    """A rank with a door for editors, and the panel pointed at it where there is one."""

    def __init__(self, kernel: IPythonKernel | None, rank: ProcMesh) -> None:
        """rank: a mesh of one rank, that is prepared (`meshbook.mesh.dap.prepare`).

        Raises: DebugError if the panel cannot be brought there, or there is no port; it is the notebook's then.
        """
        self.rank = rank
        self.switch = DebuggerSwitch.of(kernel)
        try:
            if self.switch is not None:
                self.switch.point_at(rank)
            self.door = DebugDoor(functools.partial(DebugTunnel, rank))
        except BaseException as error:
            if self.switch is not None:
                self.switch.point_at(None)
            if isinstance(error, OSError):
                raise DebugError(rank.ranks[0], f"no port for editors: {error}") from None
            raise

    @property
    def is_attached(self) -> bool:
        """Whether the panel has the rank under its debugger."""
        panel = self.switch.panel if self.switch is not None else None
        return panel is not None and panel.is_started

    def close(self, *, keep_panel: bool = False) -> None:
        """Leave the rank without a debugger, and the panel to the notebook, unless it is to move on."""
        if self.switch is not None and not keep_panel:
            self.switch.point_at(None)
        self.door.close()


class Debugged:
    """The rank of a session under `%mesh debug`, if there is one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._target: DebugTarget | None = None
        session.on_forget.append(self._on_forget)

    def begin(self, rank: ProcMesh) -> DebugTarget:
        """Turn to a rank from the one before. Raises: DebugError."""
        before, self._target = self._target, None
        if before is not None:
            before.close(keep_panel=True)
        self._target = DebugTarget(kernel_of(self._session.shell), rank)
        return self._target

    def end(self) -> DebugTarget | None:
        """Take the rank from the visual debugger. Returns: the target that there was."""
        target, self._target = self._target, None
        if target is not None:
            target.close()
        return target

    def name_cell(self, procs: ProcMesh, text: str) -> str:
        """Return the name of a cell's file on ranks; nothing when the panel does not look at them."""
        if self._target is None or not self._target.is_attached:
            return ""
        rank = self._target.rank
        return rank_name(text) if procs.name == rank.name and rank.ranks[0] in procs.ranks else ""

    def _on_forget(self, mesh: str) -> None:
        if self._target is not None and self._target.rank.name == mesh:
            self.end()
