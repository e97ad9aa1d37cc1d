"""What `faulthandler` writes when native code crashes, as the person is shown it while it comes. Pure."""

from __future__ import annotations

FATAL = "Fatal Python error: "
"""What it begins with; the stack of the thread follows."""

_MODULES = "Extension modules: "
"""Begins its last line, of some 3 kB, which names every module that is no Python."""


class CrashReportCut:
    """Takes the names of the modules out of what one rank writes to stderr; the log keeps them."""

    def __init__(self) -> None:
        self._crashed = False
        self._held = ""
        """The beginning of a line that may be the one."""

    def cut(self, text: str) -> str:
        """What to show of ``text``, the next piece."""
        if not self._crashed:
            self._crashed = FATAL in text
            if not self._crashed:
                return text
        lines = (self._held + text).split("\n")
        self._held, last = "", lines.pop()
        shown = "".join(f"{line}\n" for line in lines if not line.startswith(_MODULES))
        if last and (last.startswith(_MODULES) or _MODULES.startswith(last)):
            self._held = last
            return shown
        return shown + last
