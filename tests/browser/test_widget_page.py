"""The widget's own page at any size, without Jupyter: simulated meshes, the real ES module in a real browser."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

import meshbook_extension.widget
from meshbook.curves.series import LoggedPoints, Metrics, Points
from meshbook.mesh.states import RankStatus
from meshbook.system.devices import GpuUse
from meshbook_extension.cells.curves import WatchedNames, picture_of
from meshbook_extension.notebook.error_log import LoggedError
from meshbook_extension.output.line_reader import BarProgress
from meshbook_extension.widget.snapshot import CellNow, History, Snapshot

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]
FOLDER = Path(meshbook_extension.widget.__file__).parent
SMOOTH_MS = 100
"""For the quickest of a few updates; one takes 4 to 12 on a quiet machine."""

LOAD = """async ([code, layout, live]) => {
  const listeners = {};
  const values = {layout_of: layout, live};
  window.model = {
    sent: [], values, get: (name) => values[name], send: (content) => window.model.sent.push(content),
    on: (event, listener) => (listeners[event] ??= []).push(listener), off: () => {},
    tell: (event, message) => (listeners[event] ?? []).forEach((listener) => listener(message)),
  };
  const module = await import(URL.createObjectURL(new Blob([code], {type: 'text/javascript'})));
  window.stop = module.default.render({model: window.model, el: document.getElementById('place')});
}"""


GB = 1 << 30


def simulate(sizes: Mapping[str, int], *, calm: bool = False, per_host: int = 8, tick: int = 0) -> Snapshot:
    """A mesh in the middle of a training cell; ``calm``: all ranks idle."""
    count = math.prod(sizes.values())
    points = [dict(zip(sizes, point, strict=True)) for point in product(*(range(size) for size in sizes.values()))]
    gpus = count > 1
    statuses = [_status(rank, points[rank], f"node-{rank // per_host:03d}", calm, tick, gpus) for rank in range(count)]
    errors = (
        []
        if calm or count == 1
        else [
            LoggedError(
                1,
                "main",
                "cell 6",
                (1,) if count < 64 else tuple(range(40, 48)),
                "ValueError",
                "bad shard <b>17</b>",
                "cell 6, line 12",
                "",
                1.79e9,
            ),
        ]
    )
    bar = BarProgress("epoch 3", count, 0.62 + 0.01 * tick, 0.41, min(5, count - 1), "00:38")
    return Snapshot(
        name="main",
        device="cuda" if gpus else "cpu",
        sizes=sizes,
        statuses=statuses,
        interrupted=frozenset({11} if count >= 64 and not calm else ()),
        cells=[] if calm else [CellNow("cell 7", 74.2 + tick, count, 0, bar)],
        errors=errors,
        at=time.time(),
        moved=[0 if calm else round(9e8 + 4e8 * math.sin(tick / 6) - 3e5 * (rank % 613)) for rank in range(count)],
    )


def _status(rank: int, point: dict[str, int], host: str, calm: bool, tick: int, gpus: bool) -> RankStatus:
    state, where, busy_s = "busy", "in all_reduce (cell 7, line 5)", 74.2 + tick
    if calm:
        state, where, busy_s = "idle", "idle", 0.0
    elif rank % 8 == 5 or rank % 97 == 3:
        where = "in forward (model.py:212)"
    elif rank % 1024 == 1002:
        state, where, busy_s = "dead", "killed by SIGKILL, most likely the OOM killer (RSS 21.9 GB)", 0.0
    elif rank % 777 == 23:
        state, where = "silent", "native code holds the GIL"
    elif rank % 1500 == 44:
        state, where = "pdb", "at train.py:88"
    memory = 2_400_000_000 + (rank * 7919 % 613) * 1_000_000 + 40_000_000 * tick
    gpu = GpuUse(round(88 - rank % 11 + 7 * math.sin(tick)), memory * 14, 80 * GB, memory * 12)
    return RankStatus(
        rank=rank,
        point=point,
        host=host,
        pid=48_000 + rank,
        device=f"cuda:{rank % 8}" if gpus else "cpu",
        state=state,
        busy_s=busy_s,
        where=where,
        in_collective=where.startswith("in all_reduce"),
        rss_bytes=0 if state == "dead" else memory,
        gpu=gpu if gpus and state != "dead" else None,
    )


def live_of(sizes: Mapping[str, int], **options: Any) -> dict[str, Any]:
    snapshot, history = simulate(sizes, **options), History()
    for tick in range(40 if len(snapshot.statuses) <= 64 else 2):  # what the charts show
        history.add(simulate(sizes, **(options | {"tick": tick})))
    return snapshot.live() | {
        "phase": "live",
        "note": "",
        "tick_s": 1.0,
        "actions": ["interrupt", "stacks", "pdb", "logs", "heal"],
        "history": history.live(),
    }


def load(page: Page, sizes: Mapping[str, int], **options: Any) -> None:
    style = (FOLDER / "health.css").read_text()
    page.set_content(f"<style>{style}</style><div id=place></div>")
    code = (FOLDER / "health.js").read_text()
    page.evaluate(LOAD, [code, simulate(sizes, **options).layout(), live_of(sizes, **options)])


def test_a_widget_whose_kernel_has_gone_turns_grey_and_says_so(page: Page) -> None:
    page.clock.install()
    load(page, {"gpus": 4})
    page.clock.run_for(6_000)
    assert page.locator(".mb-phase").inner_text().startswith("no news for ")
    assert page.locator(".mb-buttons button:enabled").count() > 0
    page.clock.run_for(12_000)
    assert page.locator(".mb-phase").inner_text().endswith(": has the kernel restarted? Run %mesh again")
    assert page.locator(".mb-buttons button:enabled").count() == 0
    assert page.locator(".mb-body").evaluate("body => getComputedStyle(body).opacity") == "0.5"


@pytest.mark.parametrize(
    ("sizes", "tiles"),
    [
        ({"gpus": 1}, 1),
        ({"hosts": 2, "gpus": 4}, 8),
        ({"hosts": 8, "gpus": 8}, 64),
        ({"gpus": 256}, 256),
        ({"gpus": 300}, 300),
        ({"hosts": 512, "gpus": 8}, 512),
        ({"gpus": 4096}, 256),
        ({"dp": 16, "pp": 4, "tp": 64}, 64),
    ],
)
def test_a_mesh_of_any_size_is_a_readable_number_of_tiles(page: Page, sizes: dict[str, int], tiles: int) -> None:
    load(page, sizes)
    assert page.locator(".mb-rows").first.locator(".mb-tile").count() == tiles
    wide = page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0


def test_states_are_told_by_letters_and_names_too(page: Page) -> None:
    load(page, {"hosts": 8, "gpus": 8})
    assert page.locator(".mb-tile", has_text="!").inner_text().split() == ["11", "!"]
    assert page.get_by_label("rank 11, interrupted, in all_reduce (cell 7, line 5)").count() == 1
    told = "B 9 busy C 52 in a collective ! 1 interrupted P 1 stopped in pdb ? 1 silent"
    assert page.locator(".mb-counts").inner_text().split() == told.split()


def test_4096_ranks_are_updated_smoothly_and_a_square_opens(page: Page) -> None:
    sizes = {"hosts": 512, "gpus": 8}
    load(page, sizes)
    updates = [live_of(sizes, tick=tick) for tick in range(1, 6)]
    took_ms = page.evaluate(
        """updates => Math.min(...updates.map((live) => {
          window.model.values.live = live;
          const start = performance.now();
          window.model.tell('change:live');
          document.body.offsetHeight;
          return performance.now() - start;
        }))""",
        updates,
    )
    assert took_ms < SMOOTH_MS
    page.locator(".mb-tile").nth(5).click()
    assert page.locator(".mb-members .mb-tile").count() == 8
    page.locator(".mb-members .mb-tile").nth(4).click()
    assert "rank 44" in page.locator(".mb-detail").inner_text().lower()
    page.locator("button", has_text="Stacks").click()
    assert page.evaluate("() => window.model.sent.at(-1)") == {"kind": "act", "action": "stacks", "ranks": [44]}


def test_tiles_are_reached_by_keys(page: Page) -> None:
    load(page, {"gpus": 8})
    page.locator(".mb-tile").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("() => document.activeElement.getAttribute('aria-label')").startswith("rank 2, ")
    assert "Rank 2" in page.locator(".mb-detail").inner_text()
    page.keyboard.press("Enter")
    assert page.locator(".mb-tile[aria-pressed=true]").count() == 1
    assert page.locator(".mb-tile[tabindex='0']").count() == 1


def test_charts_tell_memory_traffic_and_gpus_in_words_too(page: Page) -> None:
    load(page, {"gpus": 8})
    charts = page.locator(".mb-chart:visible")
    assert [text.splitlines()[0].split()[0] for text in charts.all_inner_texts()] == ["memory", "traffic", "GPU"]
    assert "MB/s, median" in (charts.nth(1).locator("svg").get_attribute("aria-label") or "")
    page.locator(".mb-tile").nth(5).hover()
    assert "83 % busy" in page.locator(".mb-detail").inner_text()


def test_charts_without_anything_to_show_are_left_out(page: Page) -> None:
    load(page, {"gpus": 1}, calm=True)
    assert page.locator(".mb-chart:visible").count() == 1


def test_curves_that_are_watched_stand_below_the_ranks(page: Page) -> None:
    load(page, {"gpus": 4})
    assert page.locator(".mb-curves").is_hidden()
    metrics, watch = Metrics(), WatchedNames(())
    for size in (2, 5):
        columns = (array("d", range(size)) for _ in range(3))
        metrics.add(size, 0, [LoggedPoints("<b>loss", size, Points(*columns))])
        page.evaluate(
            "(live) => { window.model.values.live = live; window.model.tell('change:live'); }",
            live_of({"gpus": 4}) | {"curves": picture_of(watch, metrics)},
        )
        line = page.locator(".mb-curves svg path[stroke-width='1.6']")
        line.wait_for()
        assert (line.get_attribute("d") or "").count("L") == size - 1
    assert page.locator(".mb-curves b").count() == 0
    watch.names = None
    assert picture_of(watch, metrics) == ""


def test_what_a_button_brought_can_be_copied(page: Page) -> None:
    load(page, {"hosts": 8, "gpus": 8})
    assert page.locator("button[data-action=pdb][data-urgent=P]").count() == 1
    page.evaluate(
        """() => {
          window.copied = [];
          const clipboard = { writeText: async (text) => window.copied.push(text) };
          Object.defineProperty(navigator, 'clipboard', { value: clipboard, configurable: true });
          window.model.tell('msg:custom', { kind: 'answer', title: 'pdb', text: 'type x', copied: 'x' });
        }"""
    )
    page.locator("button", has_text="Copy").click()
    page.locator("button", has_text="Copied").wait_for()
    assert page.evaluate("() => window.copied") == ["x"]
    page.evaluate("() => window.model.tell('msg:custom', { kind: 'answer', title: 'Logs', text: 'line' })")
    page.locator("button", has_text="Copy").click()
    page.locator("button", has_text="Copied").wait_for()
    assert page.evaluate("() => window.copied") == ["x", "line"]


def test_it_says_when_it_can_be_seen_and_when_not(page: Page) -> None:
    load(page, {"gpus": 8})
    page.wait_for_function("() => window.model.sent.length === 1")
    page.evaluate("() => { document.getElementById('place').style.marginTop = '3000px'; }")
    page.wait_for_function("() => window.model.sent.length === 2")
    page.evaluate("() => { document.getElementById('place').style.marginTop = '0'; }")
    page.wait_for_function("() => window.model.sent.length === 3")
    page.evaluate("() => window.stop()")
    poll = page.evaluate("() => window.model.sent.map((look) => look.visible)")
    assert poll == [True, False, True, False]


def test_what_ranks_say_never_becomes_html(page: Page) -> None:
    load(page, {"gpus": 8})
    evil = "<img src=x onerror=window.broken=1><b>bold</b>"
    page.evaluate(
        """evil => {
          const live = window.model.values.live;
          live.texts = live.texts.map(() => evil);
          live.cells[0].what = evil;
          live.cells[0].progress.title = evil;
          live.note = evil;
          live.errors = [{ranks: '1', text: evil, where: evil, what: evil, at: 1}];
          window.model.values.layout_of.hosts = [evil];
          window.model.values.layout_of.name = evil;
          window.model.tell('change:layout_of');
          window.model.tell('change:live');
          window.model.tell('msg:custom', {kind: 'answer', title: evil, text: evil});
        }""",
        evil,
    )
    page.locator(".mb-tile").first.hover()
    assert page.locator("img").count() == 0
    assert page.locator(".mb-answer pre").inner_text() == evil
    assert evil in page.locator(".mb-note").inner_text()
    assert not page.evaluate("() => window.broken")
