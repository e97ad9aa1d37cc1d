"""What an agent keeps while its controller does not listen: so much output, so many results, and not more.

Whatever is not kept is counted and named: output as `wire.OutputCut`, the value of a result by a reply without it.
"""

from __future__ import annotations

KEPT_OUTPUT_BYTES = 16 << 20
"""Of all meshes of the host; the logs have the rest."""

KEPT_RESULT_BYTES = 1 << 30
"""Of all meshes of the host, payloads in the shared memory of workers included."""


class OfflineQuota:
    """Counts from the moment when nobody listens any more."""

    def __init__(self) -> None:
        self.listening = True
        self._output_bytes = self._result_bytes = 0

    def begin(self) -> None:
        """Nobody listens from now on."""
        self.listening = False
        self._output_bytes = self._result_bytes = 0

    def end(self) -> None:
        """Somebody listens again."""
        self.listening = True

    def output(self, size_bytes: int) -> bool:
        """Whether to send output, or keep it; False: it must be cut."""
        if self.listening:
            return True
        self._output_bytes += size_bytes
        return self._output_bytes <= KEPT_OUTPUT_BYTES

    def result(self, size_bytes: int) -> bool:
        """Whether to send a result, or keep it; False: the value must go, and the reply says so."""
        if self.listening:
            return True
        self._result_bytes += size_bytes
        return self._result_bytes <= KEPT_RESULT_BYTES
