"""In the place of ipykernel's debugger: the panel's requests go there, or to a rank.

Works on the instance, so a stock kernel that has loaded the extension is served as well as ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshbook.mesh.dap_client import Message
from meshbook_extension.visual_debugger.panel import RankPanel

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh


class DebuggerSwitch:
    """Sends each debug session of the panel to where it belongs; all else is ipykernel's debugger."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._own = kernel, kernel.debugger
        self.panel: RankPanel | None = None

    @classmethod
    def of(cls, kernel: Any) -> DebuggerSwitch | None:
        """The switch of this kernel, put in place at the first call; None for a kernel that cannot debug."""
        debugger = getattr(kernel, "debugger", None)
        if isinstance(debugger, cls):
            return debugger
        if not (hasattr(debugger, "process_request") and hasattr(kernel, "_publish_debug_event")):
            return None
        kernel.debugger = cls(kernel)
        return kernel.debugger  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
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
