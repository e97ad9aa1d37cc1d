"""The widget's own page at any size, without Jupyter: simulated meshes, the real ES module in a real browser."""

from __future__ import annotations

import math
import re
import time
from array import array
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

from meshbook.curves.series import LoggedPoints, Metrics, Points
from meshbook.groups.deadlock import Verdict
from meshbook.mesh.states import RankStatus
from meshbook.system.devices import GpuUse
from meshbook_extension.cells.curves import WatchedNames, picture_of
from meshbook_extension.notebook.error_log import LoggedError
from meshbook_extension.output.line_reader import BarProgress
from meshbook_extension.widget.health import HealthWidget, NoticeWidget
from meshbook_extension.widget.snapshot import CellNow, History, Snapshot

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]
SMOOTH_MS = 100
"""For the quickest of a few updates; one takes 4 to 12 on a quiet machine."""

LOAD = """async ([code, values]) => {
  const listeners = {};
  window.model = {
    sent: [], values, get: (name) => values[name], send: (content) => window.model.sent.push(content),
    on: (event, listener) => (listeners[event] ??= []).push(listener), off: () => {},
    tell: (event, message) => (listeners[event] ?? []).forEach((listener) => listener(message)),
  };
  const module = await import(URL.createObjectURL(new Blob([code], {type: 'text/javascript'})));
  window.stop = module.default.render({model: window.model, el: document.getElementById('place')});
}"""


GB = 1 << 30


def simulate(
    sizes: Mapping[str, int], *, calm: bool = False, per_host: int = 8, tick: int = 0, held: bool = False
) -> Snapshot:
    """A mesh in the middle of a training cell; calm: all ranks idle; held: rank 5 holds the others up."""
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
        verdict=Verdict((5,), tuple(rank for rank in range(count) if rank != 5), 43.0, False, "") if held else None,
        waits=[] if calm else [8 if rank % 8 == 5 else 70 - rank % 3 for rank in range(count)],
        steps=[] if calm else [f"{620 + rank % 3}/1000" for rank in range(count)],
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
        "history": history.live(),
    }


def load(page: Page, sizes: Mapping[str, int], **options: Any) -> None:
    values = {"layout_of": simulate(sizes, **options).layout(), "live": live_of(sizes, **options)}
    open_view(page, HealthWidget, values)


def open_view(page: Page, widget: Any, values: dict[str, Any]) -> None:
    """Show a widget's code and style with these traits."""
    page.set_content(f"<!doctype html><style>{widget._css}</style><div id=place></div>")
    page.evaluate(LOAD, [str(widget._esm), values])


def update(page: Page, live: dict[str, Any]) -> None:
    page.evaluate("(live) => { window.model.values.live = live; window.model.tell('change:live'); }", live)


def level(page: Page) -> str:
    return str(page.locator(".meshbook").first.get_attribute("data-level"))


def test_a_widget_whose_kernel_has_gone_turns_grey_and_says_so(page: Page) -> None:
    page.clock.install()
    load(page, {"gpus": 4})
    page.clock.run_for(6_000)
    assert page.locator(".mb-say").inner_text().startswith("no news for ")
    assert page.locator(".mb-buttons button").count() > 0
    page.clock.run_for(12_000)
    assert page.locator(".mb-say").inner_text().endswith(": has the kernel restarted? Run %mesh again")
    assert page.locator(".mb-buttons button").count() == 0
    assert page.locator(".mb-body").evaluate("body => getComputedStyle(body).opacity") == "0.5"


def test_a_hang_is_the_first_thing_one_sees_with_the_buttons_that_help(page: Page) -> None:
    load(page, {"hosts": 2, "gpus": 4}, held=True)
    assert page.locator(".mb-say").inner_text() == "rank 5 holds the others up: in forward (model.py:212), 43.0 s"
    assert level(page) == "warning"
    assert page.locator(".mb-buttons button").all_inner_texts() == ["Stacks", "pdb 5", "Interrupt"]
    assert page.locator(".mb-line.mb-odd").inner_text().split()[:2] == ["5", "busy"]
    assert page.locator(".mb-line.mb-waits").count() == 7
    page.locator("button", has_text="pdb 5").click()
    assert page.evaluate("() => window.model.sent.at(-1)") == {"kind": "act", "action": "pdb", "ranks": [5]}
    load(page, {"hosts": 2, "gpus": 8}, held=True)
    assert page.locator(".mb-tile.mb-odd").get_attribute("aria-label") == "rank 5, busy, in forward (model.py:212)"


def test_an_idle_widget_of_a_few_ranks_is_low_and_has_no_empty_box(page: Page) -> None:
    load(page, {"gpus": 4}, calm=True)
    box = page.locator(".meshbook").bounding_box()
    assert box is not None and box["height"] < 150
    assert page.locator(".mb-say").inner_text() == "4 ranks idle" and level(page) == "calm"
    assert page.locator(".mb-chart:visible").count() == 0
    page.locator("button", has_text="Charts").click()
    assert page.locator(".mb-chart:visible").count() > 0


def test_a_few_ranks_have_a_row_each_that_unfolds(page: Page) -> None:
    load(page, {"gpus": 8})
    assert page.locator(".mb-line").count() == 8 and page.locator(".mb-tile:visible").count() == 0
    heads = page.locator(".mb-rows-table th:visible").all_inner_texts()
    assert heads == ["rank", "state", "where", "step", "memory", "GPU", "waits"]
    row = page.locator(".mb-line").nth(5).inner_text().split("\t")
    assert [text.strip() for text in row] == [
        "5",
        "busy 74 s",
        "in forward (model.py:212)",
        "622/1000",
        "2.76 GB",
        "83 %",
        "8 %",
    ]
    page.locator(".mb-line").nth(5).click()
    assert "38.7 GB of 85.9 GB" in page.locator(".mb-more:visible").inner_text()
    page.locator("button", has_text="Stacks 5").click()
    assert page.evaluate("() => window.model.sent.at(-1)") == {"kind": "act", "action": "stacks", "ranks": [5]}
    page.locator(".mb-rank").nth(5).press("ArrowUp")
    page.keyboard.press("Enter")
    assert page.locator(".mb-more:visible").count() == 1
    assert page.locator(".mb-rank").nth(4).get_attribute("aria-expanded") == "true"


def test_the_notice_of_a_hang_has_buttons_until_its_cell_ends(page: Page) -> None:
    open_view(page, NoticeWidget, {"words": "rank 2 <b>holds</b>", "ranks": [2], "is_open": True})
    assert page.locator(".mb-words").inner_text() == "rank 2 <b>holds</b>"
    assert page.locator("button:visible").all_inner_texts() == ["Stacks", "pdb 2", "Interrupt"]
    page.locator("button", has_text="Stacks").click()
    assert page.evaluate("() => window.model.sent") == [{"kind": "act", "action": "stacks", "ranks": []}]
    page.evaluate("() => window.model.tell('msg:custom', { kind: 'answer', title: 'Stacks', text: 'all of them' })")
    assert page.locator(".mb-answer pre").inner_text() == "all of them"
    page.evaluate("() => { window.model.values.is_open = false; window.model.tell('change:is_open'); }")
    assert page.locator(".mb-buttons:visible").count() == 0


@pytest.mark.parametrize(
    ("sizes", "tiles"),
    [
        ({"hosts": 3, "gpus": 3}, 9),
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


def test_states_are_told_by_icons_and_names_too(page: Page) -> None:
    load(page, {"hosts": 8, "gpus": 8})
    assert page.get_by_label("rank 11, interrupted, still busy, in all_reduce (cell 7, line 5)").count() == 1
    icons = page.locator(".mb-tile path").evaluate_all("paths => paths.map(path => path.getAttribute('d'))")
    assert len(set(icons)) == 5  # busy, in a collective, interrupted, in pdb, silent
    assert page.locator(".mb-say").inner_text() == "rank 23 is silent: native code holds the GIL"


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
    page.mouse.move(1, 1)
    page.locator("button", has_text="Stacks").click()
    assert page.evaluate("() => window.model.sent.at(-1)") == {"kind": "act", "action": "stacks", "ranks": [44]}


def test_tiles_are_reached_by_keys(page: Page) -> None:
    load(page, {"gpus": 16})
    page.locator(".mb-tile").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("() => document.activeElement.getAttribute('aria-label')").startswith("rank 2, ")
    assert "Rank 2" in page.locator(".mb-detail").inner_text()
    page.keyboard.press("Enter")
    assert page.locator(".mb-tile[aria-pressed=true]").count() == 1
    page.keyboard.press("Tab")
    assert page.locator(".mb-detail:popover-open").count() == 0
    assert page.locator(".mb-tile[tabindex='0']").count() == 1


def test_charts_have_limits_and_tell_what_stands_below_the_pointer(page: Page) -> None:
    load(page, {"gpus": 8})
    charts = page.locator(".mb-chart:visible")
    assert [text.split()[0] for text in charts.all_inner_texts()] == ["memory", "traffic", "GPU", "own"]
    assert charts.first.locator(".mb-limits").inner_text().split("\n") == ["5.20 GB", "0"]
    assert "MB/s, median" in (charts.nth(1).locator("svg").get_attribute("aria-label") or "")
    box = charts.first.locator("svg").bounding_box()
    assert box is not None and box["height"] == 64
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 30)
    told = charts.first.locator(".mb-chart-text span").last.inner_text()
    assert re.fullmatch(r"[01] s ago: 4\.\d\d GB, of ranks \d\.\d\d GB to 4\.\d\d GB", told), told
    shares = charts.nth(3).locator("svg").bounding_box()
    assert shares is not None
    page.mouse.move(shares["x"] + shares["width"] * 5.5 / 8, shares["y"] + 30)
    assert charts.nth(3).locator(".mb-chart-text span").last.inner_text() == "rank 5 waits 8 % of its time"


def test_failures_stand_newest_first_with_their_age_and_can_be_dismissed(page: Page) -> None:
    load(page, {"gpus": 4})
    now = time.time()
    known = {"where": "", "what": "cell 3", "settled": False}
    errors = [
        {"number": 1, "ranks": "0", "text": "old", "at": now - 7300, **known, "settled": True},
        {"number": 2, "ranks": "1", "text": "new", "at": now - 150, **known},
        {"number": 0, "ranks": "2", "text": "ended: killed", "at": 0, **known},
    ]
    update(page, live_of({"gpus": 4}) | {"errors": errors})
    rows = page.locator(".mb-errors li")
    assert [row.splitlines()[0] for row in rows.all_inner_texts()] == ["rank 2", "rank 1", "rank 0"]
    assert "2 min ago" in rows.nth(1).inner_text() and "ran well since · 2 h ago" in rows.nth(2).inner_text()
    assert page.locator(".mb-errors li.mb-settled").count() == 1
    rows.nth(1).locator("button").click()
    assert page.evaluate("() => window.model.sent.at(-1)") == {"kind": "dismiss", "error": 2}
    assert rows.nth(0).locator("button").count() == 0, "a rank that is dead stays until it is healed"


def test_curves_that_are_watched_stand_below_the_ranks(page: Page) -> None:
    load(page, {"gpus": 4})
    assert page.locator(".mb-curves").is_hidden()
    metrics, watch = Metrics(), WatchedNames(())
    for size in (2, 5):
        columns = (array("d", range(size)) for _ in range(3))
        metrics.add(size, 0, [LoggedPoints("<b>loss", size, Points(*columns))])
        update(page, live_of({"gpus": 4}) | {"curves": picture_of(watch, metrics)})
        line = page.locator(".mb-curves svg path[stroke-width='1.6']")
        line.wait_for()
        assert (line.get_attribute("d") or "").count("L") == size - 1
    assert page.locator(".mb-curves b").count() == 0
    watch.names = None
    assert picture_of(watch, metrics) == ""


def test_what_a_button_brought_can_be_copied(page: Page) -> None:
    load(page, {"hosts": 8, "gpus": 8})
    assert page.locator("button[data-action=stacks][data-urgent=true]").count() == 1
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
          live.say.text = evil;
          live.note = evil;
          live.steps = live.steps.map(() => evil);
          live.errors = [{number: 1, ranks: '1', text: evil, where: evil, what: evil, at: 1}];
          window.model.values.layout_of.hosts = [evil];
          window.model.values.layout_of.name = evil;
          window.model.tell('change:layout_of');
          window.model.tell('change:live');
          window.model.tell('msg:custom', {kind: 'answer', title: evil, text: evil, table: [[evil], [evil]]});
        }""",
        evil,
    )
    page.locator(".mb-line").first.click()
    assert page.locator("img").count() == 0
    assert page.locator(".mb-say").inner_text() == evil == page.locator(".mb-list td").inner_text()
    assert page.locator(".mb-answer pre").inner_text() == evil
    assert evil in page.locator(".mb-note").inner_text()
    assert not page.evaluate("() => window.broken")
