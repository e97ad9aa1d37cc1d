"""A stock ipykernel and a client of it, for front ends that tests play."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

TIMEOUT_S = 60


class StockKernel:
    """Running, and ready for requests."""

    def __init__(self, name: str = "python3") -> None:
        self.manager = KernelManager(kernel_name=name)
        self.manager.start_kernel()
        self.client: BlockingKernelClient = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT_S)

    def close(self) -> None:
        """End it, and wait for the end of its processes."""
        family = psutil.Process(self.manager.provisioner.process.pid).children(recursive=True)  # type: ignore[union-attr]
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        self.manager.cleanup_resources()
        psutil.wait_procs(family, timeout=15)


@contextlib.contextmanager
def folders_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is started inside sees no configuration of the person who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        yield
