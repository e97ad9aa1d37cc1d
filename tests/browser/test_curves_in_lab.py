"""Curves of logged scalars in JupyterLab: drawn below the cell that logs, while it is busy."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]

SOON_MS = 120_000
"""Seconds on a quiet machine."""
TRAIN = """%%mesh
import time, meshbook
first = time.time()
for step in range(80):
    for _ in range(100):
        meshbook.log(other=step)
    meshbook.log(loss=(rank + 1) / (step + 1), step=step)
    time.sleep(0.1)
if rank == 0:
    print("first logged at", first)"""
LINE = ".jp-OutputArea-output svg path[stroke-width='1.6']"
QUICKSTART = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"
NOTE_THIRD_POINT = f"""() => new MutationObserver(() => {{
  const lines = [...document.querySelectorAll(".jp-CodeCell")].filter((cell) => cell.querySelector("{LINE}"));
  const drawn = lines[0]?.querySelector("{LINE}").getAttribute("d").split("L").length;
  if (window.thirdPoint || !(drawn >= 3)) return;
  window.thirdPoint = {{at: Date.now() / 1000, prompt: lines[0].querySelector(".jp-InputPrompt").textContent}};
}}).observe(document.body, {{subtree: true, childList: true, attributes: true}})"""
FIRST_LOGGED = "print('first logged at', min(row.time for row in __import__('meshbook').metrics()))"


def test_a_busy_cell_shows_a_curve_of_three_points_within_three_seconds(lab: Any, browser: Any) -> None:
    cells = ["%load_ext meshbook_extension", "%mesh spawn gpus=8 --device cpu", "%mesh watch loss", TRAIN]
    page = lab.show(browser, "curves.ipynb", cells, run=2, until="8 ranks on 1 host")
    try:
        lab.run_cell(page, 2)
        page.locator(".jp-OutputArea-output", has_text="was not logged yet").wait_for(timeout=SOON_MS)
        lab.run_cell(page, 3)
        page.locator(LINE).first.wait_for(timeout=SOON_MS)
        while (page.locator(LINE).first.get_attribute("d") or "").count("L") < 2:
            page.wait_for_timeout(20)
        seen_at = time.time()
        assert page.locator(".jp-Cell .jp-InputPrompt").nth(3).inner_text() == "[*]:"
        done = page.locator(".jp-OutputArea-output", has_text="first logged at")
        done.wait_for(timeout=SOON_MS)
        assert seen_at - float(done.inner_text().split()[-1]) < 3
        page.wait_for_function(f"document.querySelector(\"{LINE}\").getAttribute('d').split('L').length == 80")
        assert page.locator(LINE).count() == 1, "the other name is not watched"
        box = page.locator(".jp-OutputArea-output svg").first.bounding_box()
        assert box is not None and 100 < box["width"] <= 360 and box["height"] > 100
    finally:
        page.close()


def test_the_quickstart_draws_its_loss_while_the_training_cell_is_busy(lab: Any, browser: Any) -> None:
    notebook = json.loads(QUICKSTART.read_text())
    trains = next(at for at, cell in enumerate(notebook["cells"]) if "meshbook.log(" in "".join(cell["source"]))
    notebook["cells"] = notebook["cells"][: trains + 1]
    notebook["cells"].append({**notebook["cells"][trains], "id": "first-logged", "source": FIRST_LOGGED})
    (lab.root / "quickstart.ipynb").write_text(json.dumps(notebook))
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    try:
        lab.open(page, "quickstart.ipynb")
        page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
        page.evaluate(NOTE_THIRD_POINT)
        page.evaluate("() => void window.jupyterapp.commands.execute('notebook:run-all-cells')")
        done = page.locator(".jp-OutputArea-output", has_text="first logged at")
        done.wait_for(timeout=SOON_MS)
        seen = page.evaluate("() => window.thirdPoint")
        assert seen["prompt"] == "[*]:"
        assert seen["at"] - float(done.inner_text().split()[-1]) < 3
    finally:
        page.close()
