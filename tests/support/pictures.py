"""Make the pictures of the README: screenshots of cells in a real JupyterLab, on ranks that really run.

    python tests/support/pictures.py [SCENE ...]

Each scene is a notebook in the Meshbook kernel. Its cells run, and when the page shows what the picture is about, they
are written to docs/pictures/SCENE-light.png and SCENE-dark.png.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jupyter_lab import Lab, NoBrowser, open_chromium, set_theme
from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
LIMIT_BYTES = 100_000
SCALE = 2  # pixels of the file for one of the page, since many screens have as many
VIEWPORT = {"width": 912, "height": 1400}
"""Cells are then some 800 pixels wide, as the column of a README is; and all of a scene can be seen."""
MARGIN = 7
COLOURS = (256, 128, 64, 32)  # tried one after the other until the file is small enough
TRIES = 10  # a picture is taken so often while its cells change their height
SOON_MS = 400_000  # seconds on a quiet machine

PLAIN = """
.jp-NotebookPanel-toolbar, .jp-Notebook-footer, .jp-cell-toolbar, .jp-Cell-inputCollapser, .jp-Cell-outputCollapser,
.cm-cursorLayer, .Toastify { display: none !important; }
.jp-InputPrompt, .jp-OutputPrompt { flex-basis: 46px !important; min-width: 46px !important; opacity: 0.75; }
.jp-Cell, .jp-InputArea-editor { outline: none !important; box-shadow: none !important; }
"""
"""Hides what belongs to whoever edits: the cursor, the buttons of a cell, the bar beside it."""

RUN_SILENTLY = """code => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute(
  {code, silent: true, store_history: false}).done.then(reply => reply.content.status)"""

BOX = """count => {
  const cells = [...document.querySelectorAll('.jp-Notebook-cell')];
  for (const cell of cells.slice(count)) cell.style.visibility = 'hidden';  // JupyterLab adds an empty one
  const boxes = cells.slice(0, count).map(cell => cell.getBoundingClientRect());
  const top = boxes[0].top, left = boxes[0].left;
  return {x: left, y: top, width: boxes[0].width, height: boxes.at(-1).bottom - top};
}"""
"""Shows the first cells alone; returns where they stand on the page."""


class Scene(NamedTuple):
    """One picture."""

    before: str  # a cell that is not in the picture, with what the scene needs
    cells: tuple[str, ...]
    until: tuple[str, ...]
    """For each cell, a selector of what the page shows when the next one is to be run, or the picture to be taken."""


def output(text: str) -> str:
    """The selector of an output with a text."""
    return f".jp-OutputArea-output:has-text({text!r})"


WARM = "get_ipython().run_line_magic('mesh', 'spawn gpus=4'); get_ipython().run_line_magic('mesh', 'stop')"
"""From the second spawn of a kernel on there is a process that has imported torch, whose forks the ranks are."""

SCENES = {
    "ranks": Scene(
        WARM,
        (
            "%mesh spawn gpus=4",
            "%%mesh\nx = torch.ones(2) * rank\ndist.all_reduce(x)\nprint('sum', x.tolist())\nrank ** 2",
            "%%mesh gpus=1:3\nprint(f'rank {rank} of {world_size}, at {point}')",
        ),
        (output("4 ranks on 1 host"), output("[3] 9"), output("rank 2 of 4")),
    ),
    "hang": Scene(
        "get_ipython().run_line_magic('mesh', 'spawn gpus=4')",
        (
            "%%mesh\nimport time\n\ndef load_batch(step):\n    if rank == 2 and step == 40:\n"
            "        time.sleep(600)  # a disk that does not answer\n    return torch.randn(64, 8)\n\n"
            "for step in range(100):\n    loss = load_batch(step).square().mean()\n    dist.all_reduce(loss)",
        ),
        (".mb-notice button >> nth=2",),
    ),
    "curves": Scene(
        """
get_ipython().run_line_magic('mesh', 'spawn gpus=4 --device cpu')
get_ipython().run_cell_magic('mesh', '', '''
import time, meshbook
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32)[rank::4] / 16, torch.tensor(digits.target)[rank::4]
def batches():
    for _ in range(400):
        time.sleep(0.02)  # as if from a disk, so that the machine has time to draw
        chosen = torch.randint(len(images), (32,))
        yield images[chosen], labels[chosen]
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
torch.manual_seed(rank)
''')
""",
        (
            "%mesh watch loss accuracy",
            "%%mesh\nfor x, y in batches():\n    scores = model(x)\n    loss = cross_entropy(scores, y)\n"
            "    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n"
            "    meshbook.log(loss=loss, accuracy=(scores.argmax(1) == y).float().mean())",
        ),
        (output("not logged yet"), ".jp-OutputArea-output svg text:text-is('200')"),
    ),
    "widget": Scene(
        """
get_ipython().run_line_magic('mesh', 'spawn replicas=2 gpus=4 --device cpu')
get_ipython().run_cell_magic('mesh', '', '''
import time
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from tqdm.auto import tqdm

class Batches:
    def __len__(self):
        return 1500
    def __iter__(self):
        for _ in range(1500):
            time.sleep(0.02)  # as if from a disk, so that the machine has time to draw
            yield torch.randn(32, 64), torch.randint(10, (32,))

batches = Batches()
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.AdamW(model.parameters())
''')
""",
        (
            "%mesh",
            "%%mesh\nfor x, y in tqdm(batches):\n    loss = cross_entropy(model(x), y)\n"
            "    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()",
        ),
        (".mb-line >> nth=7", ".mb-say:text-matches('[3-6][0-9].%')"),
    ),
}


def photograph(page: Page, cells: int) -> bytes:
    """Return the first cells of the page as a PNG with few colours, below the limit if that can be."""
    for _ in range(TRIES):
        box = page.evaluate(BOX, cells)
        clip = {
            "x": box["x"] - MARGIN,
            "y": box["y"] - MARGIN,
            "width": box["width"] + 2 * MARGIN,
            "height": box["height"] + 2 * MARGIN,
        }
        shot = page.screenshot(clip=clip, timeout=SOON_MS)
        if page.evaluate(BOX, cells) == box:  # else a live cell has grown meanwhile, and its last line is cut
            break
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    for colours in COLOURS:
        file = io.BytesIO()
        image.quantize(colours, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
        if file.tell() <= LIMIT_BYTES:
            break
    return file.getvalue()


def make(browser: Browser, lab: Lab, name: str, folder: Path) -> None:
    """Run a scene, write its two pictures, and end its kernel, which ends its ranks."""
    scene = SCENES[name]
    lab.write(f"{name}.ipynb", list(scene.cells), "meshbook")
    page = browser.new_page(viewport=VIEWPORT, device_scale_factor=SCALE)
    lab.open(page, f"{name}.ipynb")
    page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
    status = page.evaluate(RUN_SILENTLY, scene.before)
    if status != "ok":
        raise SystemExit(f"The cell that prepares the picture {name} failed; run it in a notebook to see why.")
    for index, until in enumerate(scene.until):
        lab.run_cell(page, index)
        page.locator(until).first.wait_for(timeout=SOON_MS)
    page.add_style_tag(content=PLAIN)
    for theme in ("light", "dark"):
        set_theme(page, f"JupyterLab {theme.capitalize()}")
        page.evaluate("document.activeElement.blur()")
        page.mouse.move(1, 1)
        page.wait_for_timeout(1000)
        path = folder / f"{name}-{theme}.png"
        path.write_bytes(photograph(page, len(scene.cells)))
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
    set_theme(page, "JupyterLab Light")
    page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=f"by default all: {', '.join(SCENES)}")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.scenes if name not in SCENES]:
        parser.error(f"there is no scene {unknown[0]!r}, but {', '.join(SCENES)}")
    PICTURES.mkdir(exist_ok=True)
    try:
        with open_chromium() as browser, tempfile.TemporaryDirectory() as root:
            lab = Lab(Path(root), {"MESHBOOK_PREWARM": "1", "MESHBOOK_LEASE_S": "5"})
            try:
                lab.wait_for_ready()
                for name in args.scenes or SCENES:
                    make(browser, lab, name, PICTURES)
            finally:
                lab.close()
    except NoBrowser as missing:
        print(f"Pictures want a browser: {missing}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
