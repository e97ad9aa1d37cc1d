"""A kernel and a client of it, for benchmarks and tests that play a front end."""

from __future__ import annotations

from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

TIMEOUT_S = 60.0


class RunningKernel:
    """Started, with the channels of its client open; `wait_for_ready` before the first request."""

    def __init__(self, name: str = "python3", **start_options: Any) -> None:
        self.manager = KernelManager(kernel_name=name)
        self.manager.start_kernel(extra_arguments=["--log-level=ERROR"], **start_options)
        self.client: BlockingKernelClient = self.manager.blocking_client()
        self.client.start_channels()

    def wait_for_ready(self) -> None:
        """Wait until the kernel answers."""
        self.client.wait_for_ready(timeout=TIMEOUT_S)

    def execute(self, code: str, **options: Any) -> str:
        """Send a cell as a front end with a person does; returns its request.

        It is run behind a cell that failed, too: for some moments ipykernel would drop it.
        """
        return str(self.client.execute(code, stop_on_error=False, **options))

    def reply_to(self, request: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """The content of the reply to a request on the shell channel; earlier ones are passed over."""
        while True:
            message = self.client.get_shell_msg(timeout=timeout_s)
            if message["parent_header"].get("msg_id") == request:
                return dict(message["content"])

    def close(self) -> None:
        """End the kernel if it still runs, and every thread of the client."""
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=not self.manager.is_alive())
        self.manager.cleanup_resources()
