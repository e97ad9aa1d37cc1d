"""Curves of logged scalars in JupyterLab: drawn below the cell that logs, while it is busy."""

from __future__ import annotations

import time
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
