"""A notebook on a GPU: cells of the Meshbook kernel spawn a rank there, train, fail, are interrupted, and go on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jupyter_core.utils import ensure_event_loop

from benchmarks.running_kernel import RunningKernel

Run = Callable[..., str]
"""Takes the code of a cell and returns all that the cell showed."""
TIMEOUT_S = 60.0
TRAINING = """%%mesh
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(128, 64, device=device)
losses = []
for step in range(50):
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); losses.append(loss.item())
dist.all_reduce(loss)
print(f"{dist.get_backend()} on {x.device}: {losses[-1] < losses[0] / 2}")"""


@pytest.fixture(scope="session")
def jupyter_event_loop() -> None:
    """Makes the event loop of jupyter_client, which lasts as long as this process."""
    ensure_event_loop()


@pytest.fixture(scope="module")
def kernel(jupyter_event_loop: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningKernel]:
    """A Meshbook kernel that sees none of the user's settings."""
    root = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(root / name.lower()))
        patch.setenv("JUPYTER_PATH", str(root / "prefix" / "share" / "jupyter"))
        install = [sys.executable, "-m", "meshbook_kernel", "install", "--prefix", str(root / "prefix")]
        subprocess.run(install, check=True, timeout=60)
        running = RunningKernel("meshbook")
        try:
            running.wait_for_ready()
            yield running
        finally:
            running.close()


@pytest.fixture(scope="module")
def run(kernel: RunningKernel) -> Run:
    """Executes a cell with the one rank on the card, and returns what it showed; ``status`` is how it has to end."""

    def execute(code: str, status: str = "ok") -> str:
        shown: list[str] = []

        def add(message: dict[str, dict[str, object]]) -> None:
            content = message["content"]
            data = content.get("data")
            shown.append(str(content.get("text") or (data.get("text/plain") if isinstance(data, dict) else "") or ""))
            shown.append("\n".join(map(str, content.get("traceback", ()))))  # type: ignore[call-overload]

        reply = kernel.client.execute_interactive(code, timeout=TIMEOUT_S, output_hook=add, stop_on_error=False)
        assert reply["content"]["status"] == status, "".join(shown)
        return "".join(shown)

    execute("%mesh spawn gpus=1")
    return execute


def test_a_cell_trains_on_the_card(run: Run) -> None:
    assert "nccl on cuda:0: True" in run(TRAINING)


def test_values_and_tensors_come_back(run: Run) -> None:
    run("%%mesh\nw = torch.arange(4, device=device) * 2")
    run("%mesh pull w")
    assert "[0, 2, 4, 6] cpu" in run("print(w.item(gpus=0).tolist(), w.item(gpus=0).device)")


def test_mesh_tensors_compute_there_from_the_notebook(run: Run) -> None:
    run("import torch, meshbook\nt = meshbook.distribute(torch.ones(8, 8), meshbook.current_mesh())")
    assert "512.0" in run("print((t @ t).sum().item())")


def test_the_table_shows_the_card(run: Run) -> None:
    assert "cuda:0" in run("%mesh")


def test_out_of_memory_says_what_to_do_and_keeps_the_rank(run: Run) -> None:
    run("%%mesh\nkept = torch.arange(3, device=device)")
    fill = "%%mesh\ndef fill():\n    held = torch.empty(1 << 28, dtype=torch.uint8, device=device)\n"
    shown = run(fill + "    return held, torch.empty(1 << 50, dtype=torch.uint8, device=device)\nfill()", "error")
    assert "memory" in shown and "the frames of this error hold 268 MB" in shown and "%mesh free" in shown, shown
    run("%mesh free")
    assert "[0, 1, 2]" in run("%%mesh\nprint(kept.tolist())")


def test_an_interrupt_ends_a_loop_of_kernels(run: Run, kernel: RunningKernel, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    run("%%mesh\nkept = torch.arange(3, device=device)")
    request = kernel.execute(
        f"%%mesh\nfrom pathlib import Path\nPath({str(begun)!r}).touch()\n"
        "while True:\n    y = torch.randn(2048, 2048, device=device); y @ y; torch.cuda.synchronize()"
    )
    deadline = time.monotonic() + TIMEOUT_S
    while not begun.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    kernel.manager.interrupt_kernel()
    assert kernel.reply_to(request, TIMEOUT_S)["status"] == "error"
    assert "[0, 1, 2]" in run("%%mesh\nprint(kept.tolist())")
