"""A stock ipykernel and a client of it, for front ends that tests play."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import psutil
import pytest

from benchmarks.running_kernel import RunningKernel

TIMEOUT_S = 60


class StockKernel(RunningKernel):
    """Running, and ready for requests."""

    def __init__(self, name: str = "python3") -> None:
        super().__init__(name)
        self.wait_for_ready()

    def close(self) -> None:
        """End it, and wait for the end of its processes."""
        family = psutil.Process(self.manager.provisioner.process.pid).children(recursive=True)  # type: ignore[union-attr]
        super().close()
        psutil.wait_procs(family, timeout=15)


TKernel = TypeVar("TKernel", bound=StockKernel)


@contextlib.contextmanager
def with_extension(kind: type[TKernel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TKernel]:
    """A front end of this kind, whose kernel has loaded the extension and sees no configuration of the person."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        kernel = kind()
    try:
        assert kernel.reply_to(kernel.client.execute("%load_ext meshbook_extension"))["status"] == "ok"
        yield kernel
    finally:
        kernel.close()
