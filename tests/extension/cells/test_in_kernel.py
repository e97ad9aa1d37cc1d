"""The extension in a stock ipykernel: where output lands, when, and what the reply says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_lines import by_rank, each_of
from stock_kernel import TIMEOUT_S, StockKernel, with_extension

from meshbook_extension.output.line_merging import WINDOW_S


class Request:
    """One cell that was sent, and all that came back for it."""

    def __init__(self, message_id: str) -> None:
        self.id = message_id
        self.reply: dict[str, Any] = {}
        self.outputs: list[tuple[str, dict[str, Any]]] = []
        self.idle = False
        self.sent_at = time.monotonic()
        self.replied_after_s = 0.0

    def text(self, name: str | None = None) -> str:
        """The text of one stream; of both, and of displays."""
        return "".join(
            content["text"] if kind == "stream" else f"{content['data'].get('text/plain', '')}\n"
            for kind, content in self.outputs
            if (kind == "stream" and name in (None, content["name"])) or (kind == "display_data" and name is None)
        )

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [content for each, content in self.outputs if each == kind]


class Kernel(StockKernel):
    """A stock kernel with the extension loaded, and a front end that keeps every output with its request."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}

    def send(self, code: str, **options: Any) -> Request:
        request = Request(self.execute(code, **options))
        self.requests[request.id] = request
        return request

    def run(self, code: str, **options: Any) -> Request:
        return self.wait(self.send(code, **options))

    def wait(self, request: Request) -> Request:
        """Until the reply is there and the kernel is idle again."""
        self.until(lambda: request.reply and request.idle, request)
        return request

    def until(self, condition: Callable[[], object], request: Request) -> None:
        """Take in what comes until the condition holds of the request."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, request.outputs
            self.listen(0.05)

    def listen(self, seconds: float) -> None:
        """Take in what comes."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.client.iopub_channel.socket.poll(min(left, 0.01) * 1000):
                self._take(self.client.iopub_channel.get_msg(timeout=1))
            if self.client.shell_channel.socket.poll(0):
                message = self.client.shell_channel.get_msg(timeout=1)
                request = self.requests.get(message["parent_header"].get("msg_id", ""))
                if request is not None:
                    request.reply = message["content"]
                    request.replied_after_s = time.monotonic() - request.sent_at

    def _take(self, message: dict[str, Any]) -> None:
        request = self.requests.get(message["parent_header"].get("msg_id", ""))
        if request is None:
            return
        kind, content = message["msg_type"], message["content"]
        if kind == "status":
            request.idle = request.idle or content["execution_state"] == "idle"
        else:
            request.outputs.append((kind, content))


@pytest.fixture(scope="module")
def kernel(jupyter_loop: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with with_extension(Kernel, tmp_path_factory) as kernel:
        ready = kernel.run("%mesh spawn gpus=4 --device cpu")
        assert 'mesh "main": gpus=4, cpu, gloo; ready in ' in ready.text()
        yield kernel


@pytest.mark.slow
def test_output_and_results_are_there_before_the_cell_is_idle(kernel: Kernel) -> None:
    request = kernel.run("%%mesh\nprint('hello')\nrank // 2")
    assert request.reply["status"] == "ok"
    assert by_rank(request.text("stdout")) == each_of(4, "hello")
    assert [display["data"]["text/plain"] for display in request.of("display_data")] == ["[0,1] 0", "[2,3] 1"]


GRID = """%%mesh
import time
from IPython.display import HTML, clear_output, display
time.sleep({pause} * (3 - rank))
display(HTML(f"<b>plot of {{rank}}</b>"))
print("after", rank)
"""


@pytest.mark.slow
def test_displays_of_all_ranks_are_one_grid_above_what_they_print_later(kernel: Kernel) -> None:
    request = kernel.run(GRID.format(pause=0.05))
    grids = [content["data"]["text/html"] for kind, content in request.outputs if "data" in content]
    assert next(kind for kind, _ in request.outputs if kind != "execute_input") == "display_data"
    assert re.findall(r"\[(\d)\] gpus=(\d)", grids[-1]) == [(str(rank), str(rank)) for rank in range(4)]
    assert re.findall(r"plot of (\d)", grids[-1]) == ["0", "1", "2", "3"]
    assert by_rank(request.text("stdout")) == {rank: [f"after {rank}"] for rank in range(4)}


@pytest.mark.slow
def test_clear_output_acts_on_the_card_of_its_rank(kernel: Kernel) -> None:
    code = (
        GRID.format(pause=0) + "time.sleep(0.6)\nif rank != 2:\n    clear_output(wait=True)\n    display(HTML('new'))"
    )
    request = kernel.run(code)
    last = [content["data"]["text/html"] for content in request.of("update_display_data")][-1]
    assert "[0,1,3] same" in last and last.count("new") == 1
    assert re.findall(r"plot of (\d)", last) == ["2"] and "warn-color1" in last


@pytest.mark.slow
def test_only_the_ranks_that_were_asked_for_show_output(kernel: Kernel) -> None:
    request = kernel.run("%%mesh --only 1:3\nprint('line', rank)\ndisplay(HTML(f'{rank}'))\nrank")
    assert request.text("stdout") == "[1] line 1\n[2] line 2\n"
    assert [each["data"]["text/plain"] for each in request.of("display_data")][1:] == ["[1] 1", "[2] 2"]
    assert kernel.run("_mesh.values()").of("execute_result")[0]["data"]["text/plain"] == "[0, 1, 2, 3]"
    refused = kernel.run("%%mesh --only 9\n1").of("error")[0]
    assert "9" in refused["evalue"] and refused["ename"] in ("RankError", "UsageError")


@pytest.mark.slow
def test_a_slow_start_says_how_far_it_is_in_one_line(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "computing_module.py").write_text(
        "import time\nend = time.process_time() + 4\nwhile time.process_time() < end: pass\n"
    )
    kernel.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    spawn = "%mesh spawn gpus=2 --name slow --no-torch --preload computing_module --within 3s"
    request = kernel.run(spawn)
    kernel.run("%mesh stop slow\n%mesh use main")
    assert 'mesh "slow": gpus=2, cpu, no process group; ready in ' in request.text("stdout"), request.outputs
    (shown,) = request.of("display_data")
    lines = [each["data"]["text/plain"] for each in (shown, *request.of("update_display_data"))]
    assert re.fullmatch(r"(starting (ranks|Python)|importing \w+), 0/2 ranks, 1 s", lines[0]), lines
    assert any(line.startswith("importing computing_module, 0/2 ranks, ") for line in lines) and lines[-1] == "", lines
    assert len({each["transient"]["display_id"] for each in (shown, *request.of("update_display_data"))}) == 1


def shown_by(request: Request) -> list[str]:
    """Lines, and what rich output shows, in the order of a front end."""
    shown: list[str] = []
    for kind, content in request.outputs:
        if kind == "stream":
            shown += content["text"].splitlines()
        elif kind == "display_data":
            shown.append(content["data"].get("text/html") or content["data"]["text/plain"])
    return shown


LOOP = """
from IPython.display import HTML, display
import sys
for k in range(6):
    print("before", k)
    display(HTML(f"figure {k}"))
    print("after", k)
    print("error", k, file=sys.stderr)
"""


@pytest.mark.parametrize("group", ["equal", "rank", "none"])
def test_what_is_printed_after_a_plot_stands_below_it(kernel: Kernel, group: str) -> None:
    expected = [
        line for k in range(6) for line in (f"[0] before {k}", "[0]", f"figure {k}", f"[0] after {k}", f"[0] error {k}")
    ]
    for _ in range(4):
        assert shown_by(kernel.run(f"%%mesh rank=0 --group {group}{LOOP}")) == expected


def printed_within_the_window(kernel: Kernel) -> bool:
    """Whether the ranks have printed so close to each other that equal lines must be one; they have noted when."""
    noted = [ast.literal_eval(lines[0]) for lines in by_rank(kernel.run("%mesh eval noted").text()).values()]
    assert noted, "no rank has noted when it printed"
    return max(ended for _, ended in noted) - min(began for began, _ in noted) < WINDOW_S


TRIES = 10
"""Before ranks of a busy machine print within the window of each other."""


def test_equal_lines_are_one_behind_lines_that_differ(kernel: Kernel) -> None:
    cell = (
        "%%mesh\nimport time\ndist.barrier(); began = time.monotonic()\n"
        "print('rank', rank); print('same'); display('equal'); print(rank); print('end')\n"
        "noted = began, time.monotonic()"
    )
    expected = [*(f"[{rank}] rank {rank}" for rank in range(4)), "[0-3] same", "[0-3] 'equal'"]
    expected += [*(f"[{rank}] {rank}" for rank in range(4)), "[0-3] end"]
    for _ in range(TRIES):
        shown = shown_by(kernel.run(cell))
        if printed_within_the_window(kernel):
            assert shown == expected
            return
    pytest.fail("the ranks have never printed within the window")


LATE = """%%mesh
import pathlib, threading, time
def later():
    global noted
    while not gate.exists():
        time.sleep(0.02)
    time.sleep(max(0, float(gate.read_text()) + 0.03 * rank - time.monotonic()))
    began = time.monotonic()
    print('late')
    noted = began, time.monotonic()
gate = pathlib.Path({gate!r})
thread = threading.Thread(target=later)
thread.start()
"""


def test_late_output_lands_in_the_cell_that_caused_it_and_equal_lines_of_it_are_one(
    kernel: Kernel, tmp_path: Path
) -> None:
    for attempt in range(TRIES):
        gate, written = tmp_path / f"{attempt}", tmp_path / "written"
        late = kernel.run(LATE.format(gate=str(gate)))
        at = time.monotonic() + 0.5
        written.write_text(str(at))
        written.rename(gate)
        other = kernel.run(f"import time\nprint('other cell')\ntime.sleep(max(0, {at} + 0.3 - time.monotonic()))")
        kernel.run("%%mesh\nthread.join()")
        kernel.until(lambda late=late: by_rank(late.text()) == each_of(4, "late"), late)
        assert other.text() == "other cell\n"
        if printed_within_the_window(kernel):
            assert late.text() == "[0-3] late\n"
            return
    pytest.fail("the ranks have never printed within the window")


def test_output_of_a_job_lands_below_the_cell_that_started_it(kernel: Kernel) -> None:
    job = kernel.run(
        "%%mesh --async\nimport time\ntime.sleep(0.5)\nprint('from the job')\nif rank == 1: raise ValueError('bad')"
    )
    assert job.text().startswith("job 1 runs on ranks 0-3") and job.reply["status"] == "ok"
    wait = kernel.run("%mesh wait 1")
    assert wait.reply["status"] == "error" and wait.reply["ename"] == "CallFailed"
    assert "from the job\n" in job.text() and "from the job" not in wait.text()
    assert "rank 1 raised ValueError: bad\n" in job.text() and not job.of("error")
    kernel.listen(0.3)
    assert "job 1 failed after" in job.text()


@pytest.mark.slow
def test_a_tool_that_executes_notebooks_gets_one_error_with_all_of_it(kernel: Kernel) -> None:
    failed = kernel.run("%%mesh\nif rank == 1: raise ValueError('bad shard')\ndist.barrier()", allow_stdin=False)
    (error,) = failed.of("error")
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"]))
    assert "----> 2 if rank == 1: raise ValueError('bad shard')" in text
    assert "CallFailed: rank 1 raised ValueError: bad shard (cell " in text and "  again: run the cell again" in text
    assert failed.text().startswith("rank 1 raised ValueError: bad shard (cell ")


@pytest.mark.slow
def test_a_function_of_the_notebook_fails_in_its_cell(kernel: Kernel) -> None:
    kernel.run("procs = get_ipython()._meshbook_session.mesh()")
    failed = kernel.run("def halve(n):\n    return 1 / n\nprocs.execute(halve, 0).get()")
    number = failed.reply["execution_count"]
    (error,) = failed.of("error")
    assert f"Cell [{number}], line 2, in halve(n)" in re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"]))
    assert f"division by zero (cell {number}, line 2)" in kernel.run("%mesh errors -n 1").text()


@pytest.mark.slow
def test_a_cell_says_which_jobs_have_ended_since_the_last_one(kernel: Kernel) -> None:
    job = kernel.run("%%mesh --async\nif rank == 1: raise ValueError('bad')")
    kernel.until(lambda: " failed after " in job.text(), job)
    news = kernel.run("1 + 1").text("stdout")
    assert re.search(r"job \d+ failed after [\d.]+ s: rank 1 raised ValueError: bad \(cell \d+, line 2\)", job.text())
    assert re.fullmatch(r"job \d+ \(cell \d+\) failed [\d.]+ s ago: rank 1 raised ValueError: bad.*\n", news), news
    assert kernel.run("1 + 1").text() == ""


class Page:
    """A second front end, whose requests have a session of their own."""

    def __init__(self, kernel: Kernel) -> None:
        self.client: Any = kernel.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT_S)

    def run(self, code: str) -> str:
        texts: list[str] = []

        def add(message: dict[str, Any]) -> None:
            content = message["content"]
            texts.append(content.get("text", "") + content.get("evalue", ""))

        self.client.execute_interactive(code, timeout=TIMEOUT_S, output_hook=add, allow_stdin=True)
        return "".join(texts)

    def wait_for_text(self, text: str) -> None:
        seen = ""
        while text not in seen:
            message = self.client.get_iopub_msg(timeout=TIMEOUT_S)
            seen += message["content"].get("text", "")


@pytest.mark.slow
def test_a_page_that_was_loaded_again_sees_the_output_that_it_missed(kernel: Kernel) -> None:
    beats = "import time\nfor i in range({}): print('beat', i); time.sleep(0.1)"
    running = kernel.send(f"%%mesh\n{beats.format(25)}")
    kernel.until(lambda: "beat 3" in running.text(), running)
    page = Page(kernel)
    try:
        told = page.run("1 + 1")
        assert re.search(
            r"^cell (\d+) wrote \d+ lines for a page that has gone: %mesh output \1$", told, re.MULTILINE
        ), told
        assert "beat" not in told and page.run("1 + 1") == ""
        assert by_rank(page.run("%mesh output")) == each_of(4, *(f"beat {number}" for number in range(25)))
        assert "no output of a cell 7000 on a mesh is kept" in page.run("%mesh output 7000")
        page.run(f"%%mesh --async\n{beats.format(15)}")
        assert "still runs; its output goes on here" in page.run("%mesh output")
        page.wait_for_text("beat 14")
        page.run("%mesh wait")
    finally:
        page.client.stop_channels()


def test_a_failure_is_an_error_reply_with_the_traceback_shown_once(kernel: Kernel) -> None:
    request = kernel.run("%%mesh\nif rank == 1:\n    raise ValueError('bad shard')")
    assert request.reply["status"] == "error"
    assert request.reply["ename"] == "CallFailed"
    assert "rank 1 raised ValueError: bad shard" in request.reply["evalue"]
    (failure,), (last,) = request.of("display_data"), request.of("error")
    assert "Traceback (most recent call last)" in failure["data"]["text/plain"]
    html = failure["data"]["text/html"]
    assert "rank 1 raised ValueError: bad shard\n" in html and "\x1b" not in html and "color:#d9534f" in html
    assert "Traceback" not in "".join(last["traceback"]) and len(last["traceback"]) == 2


def test_an_interrupt_gives_the_prompt_back_with_an_error_reply(kernel: Kernel) -> None:
    request = kernel.send("%%mesh\nprint('started')\nimport time\ntime.sleep(20)")
    kernel.until(lambda: "started" in request.text(), request)
    kernel.listen(0.2)
    pressed = time.monotonic()
    kernel.manager.interrupt_kernel()
    kernel.wait(request)
    assert time.monotonic() - pressed < 5
    assert request.reply["status"] == "error" and request.reply["ename"] == "CallInterrupted"
    assert "ranks 0-3 stopped, all variables kept" in request.reply["evalue"]
    assert len(request.of("error")) == 1


@pytest.mark.slow
def test_a_flood_becomes_few_messages_and_leaves_the_kernel_responsive(kernel: Kernel) -> None:
    request = kernel.run("%%mesh\nfor i in range(20000): print(f'line {i}')")
    assert request.reply["status"] == "ok"
    streams = request.of("stream")
    assert len(streams) <= 12 + 10 * request.replied_after_s
    assert len(request.text()) < 400_000
    assert "not shown: " in request.text() and "%mesh logs -n 1000" in request.text()
    assert "[0-3] line 19999\n" in request.text()


def test_logs_are_followed_until_an_interrupt_and_the_cell_is_no_error(kernel: Kernel) -> None:
    job = kernel.run("%%mesh --async\nimport time\nfor i in range(200): print('beat', i); time.sleep(0.05)")
    request = kernel.send("%mesh logs -f -n 0")
    kernel.until(lambda: "beat" in request.text(), request)
    kernel.manager.interrupt_kernel()
    kernel.wait(request)
    assert request.reply["status"] == "ok", request.reply
    assert not request.of("error") and "] beat " in request.text("stdout")
    kernel.run("%mesh cancel 1" if "job 1 " in job.text() else "%mesh interrupt")
    timed = kernel.run("%%mesh --time\nimport time; time.sleep(0.05 * rank)")
    kinds = [kind for kind, _ in timed.outputs if kind in ("stream", "display_data")]
    assert kinds == ["stream", "display_data"], timed.outputs  # the headline, then the chart


def test_progress_bars_update_one_display(kernel: Kernel) -> None:
    request = kernel.run(
        "%%mesh\nimport sys, time\n"
        "for i in range(10):\n    print(f'\\r{10 * i}%', end='', file=sys.stderr, flush=True); time.sleep(0.1)\n"
        "print('\\r100%', file=sys.stderr)"
    )
    assert by_rank(request.text("stdout")) == each_of(4, "100%")
    assert request.text("stderr") == ""  # an ended bar is good news
    (bars,) = request.of("display_data")
    updates = request.of("update_display_data")
    assert updates and {each["transient"]["display_id"] for each in updates} == {bars["transient"]["display_id"]}
    assert updates[-1]["data"]["text/plain"] == ""


def test_capture_takes_the_output_of_ranks_too(kernel: Kernel) -> None:
    request = kernel.run("%%capture kept\n%%mesh\nprint('hello')\nrank * 0")
    assert request.text() == "" and not request.of("display_data")
    request = kernel.run("print(kept.stdout)\nprint(kept.outputs[0].data['text/plain'])")
    printed, _, result = request.text().partition("\n\n")
    assert by_rank(printed) == each_of(4, "hello") and result == "[0-3] 0\n"


def test_help_is_a_question_mark_away(kernel: Kernel) -> None:
    (page,) = kernel.run("%%mesh?").reply["payload"]
    assert "--no-collective" in page["data"]["text/plain"]
    assert "--preload MOD,.." in kernel.run("%mesh spawn?").text()


def test_auto_mode_leaves_the_front_ends_own_code_here(kernel: Kernel) -> None:
    kernel.run("%mesh auto on")
    assert by_rank(kernel.run("print(rank * 0)").text()) == each_of(4, "0")
    kernel.run("import os; mine = os.getpid()", store_history=False)
    kernel.run("%mesh auto off")
    assert kernel.run("print(mine == os.getpid())").text() == "True\n"


def test_syntax_errors_name_the_line_of_the_notebook(kernel: Kernel) -> None:
    request = kernel.run("\n\n%%mesh\nx = 1\ny = = 2")
    assert request.reply["status"] == "error" and "line 5" in request.reply["evalue"]
    request = kernel.run("\n\n%%mesh\nx = 1\n1/0")
    assert f"(cell {request.reply['execution_count']}, line 5)" in request.reply["evalue"]
    kernel.run("%mesh auto on")
    request = kernel.run("x = 1\n1/0")
    kernel.run("%mesh auto off")
    assert ", line 2)" in request.reply["evalue"]


def headless(folder: Path, cells: list[str], report: str, **options: object) -> list[str]:
    """What a program prints that has nbclient run ``cells``. report: its lines behind that, with ``error`` or None."""
    script = folder / "run.py"
    script.write_text(
        "import nbformat, nbclient\n"
        f"cells = {['%load_ext meshbook_extension', *cells]!r}\n"
        "notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])\n"
        "error = None\n"
        "try:\n"
        f"    nbclient.NotebookClient(notebook, kernel_name='python3', timeout=60, **{options!r}).execute()\n"
        "except nbclient.exceptions.CellExecutionError as raised:\n"
        f"    error = raised\n{report}"
    )
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_headless_run_stops_where_a_rank_fails(tmp_path: Path) -> None:
    cells = [
        "%mesh spawn gpus=2 --no-group --device cpu",
        '%%mesh\nif rank == 1: raise ValueError("bad shard")',
        'open("reached", "w")',
    ]
    report = (
        "print(error.ename, error.evalue)\n"
        "print([output.ename for output in notebook.cells[2].outputs if output.output_type == 'error'])\n"
    )
    assert headless(tmp_path, cells, report) == [
        "CallFailed rank 1 raised ValueError: bad shard (cell 3, line 2)",
        "['CallFailed']",
    ]
    assert not (tmp_path / "reached").exists()


@pytest.mark.slow
def test_a_headless_run_keeps_what_jobs_and_threads_print_after_their_cells(tmp_path: Path) -> None:
    cells = [
        "%mesh spawn gpus=2 --no-group --device cpu",
        "%%mesh --async\nimport time; time.sleep(1); print('of the job'); 1 / rank",
        "%mesh wait",
        "%%mesh\nimport threading\nthreading.Timer(1, print, ['of a thread']).start()",
        "import time; time.sleep(3)",
    ]
    report = (
        "for cell in notebook.cells[2:]:\n"
        "    text = ''.join(each.get('text') or each.get('data', {}).get('text/plain', '') for each in cell.outputs)\n"
        "    print([words in text for words in ('[0,1] of the job', 'ZeroDivisionError', '[0,1] of a thread')])\n"
    )
    shown = [[False, False, False], [True, True, False], [False, False, False], [False, False, True]]
    assert headless(tmp_path, cells, report, allow_errors=True) == list(map(str, shown))


@pytest.mark.slow
def test_a_headless_run_keeps_the_last_curve_of_each_job_and_tells_its_end_once(tmp_path: Path) -> None:
    log = "import time, meshbook\nfor step in range({}):\n    meshbook.log(loss=10 * rank + step)\n    time.sleep(0.4)"
    cells = [
        "%mesh spawn gpus=2 --no-group --device cpu",
        "%mesh watch loss",
        "%%mesh gpus=0 --async\n" + log.format(8),
        "%%mesh gpus=1 --async\n" + log.format(4),
        "%mesh wait",
    ]
    report = (
        "outputs = [each for cell in notebook.cells[3:] for each in cell.outputs]\n"
        "text = '\\n'.join(each.get('text') or each.data['text/plain'] for each in outputs)\n"
        "print(sorted(line.split(' after')[0] for line in text.splitlines() if line and ' runs on ' not in line))\n"
    )
    lines = ["job 1 done", "job 2 done", "loss 13 at step 3", "loss 7 at step 7"]
    assert headless(tmp_path, cells, report) == [str(lines)]


@pytest.mark.slow
def test_the_cell_that_ends_a_job_has_the_note_of_its_end(tmp_path: Path) -> None:
    busy = (  # the thread that publishes, as on a busy machine
        "class Busy:\n    def pump(self, now): time.sleep(1.5)\n"
        "get_ipython()._meshbook_session.publisher.schedule(Busy(), 0)\ntime.sleep(0.2)\n"
    )
    cells = [
        "%mesh spawn gpus=2 --device cpu",
        "%%mesh --async\nimport time; dist.barrier(); time.sleep(60 * rank); dist.barrier()",
        "import time; time.sleep(0.5)",
        f"{busy}%mesh cancel 1",
        "%%mesh --async --out values\ntime.sleep(1); rank",
        f"{busy}%mesh wait 2",
        "print(values.values())",
    ]
    report = (
        "for cell in notebook.cells[3:]:\n"
        "    texts = [each.get('text') or each.data['text/plain'] + '\\n' for each in cell.outputs]\n"
        "    lines = ''.join(texts).splitlines()\n"
        "    print(sorted(line.split(' after')[0] for line in lines if not line.startswith('[')))\n"
    )
    cancelled = ["job 1 cancelled", "job 1 interrupted: ranks 0,1 stopped, all variables kept"]
    runs = ["job 2 runs on ranks 0,1; wait for it: %mesh wait 2"]
    expected = [[], cancelled, runs, ["job 2 done"], []]
    assert headless(tmp_path, cells, report) == list(map(str, expected))


def test_prints_of_a_call_land_in_the_cell_that_made_it(kernel: Kernel) -> None:
    kernel.run("%mesh use main --out procs")
    first = kernel.run("procs.execute(print, 'from a call').get()")
    second = kernel.run("procs.run('40 + 2').get().values()")
    assert by_rank(first.text("stdout")) == each_of(4, "from a call")
    assert second.text() == ""
    assert second.of("execute_result")[0]["data"]["text/plain"] == "[42, 42, 42, 42]"


SLEEP = "import time\nprint('begun')\ntime.sleep(60)"


def until_all_have_begun(kernel: Kernel, request: Request) -> None:
    """Each of four ranks has said so, and has gone on to its next line."""
    kernel.until(lambda: by_rank(request.text()) == each_of(4, "begun"), request)
    kernel.listen(0.2)


def test_an_interrupt_of_a_call_in_python_reaches_the_ranks(kernel: Kernel) -> None:
    kernel.run("%mesh use main --out procs")
    request = kernel.send(f"procs.run({SLEEP!r}).get()")
    until_all_have_begun(kernel, request)
    kernel.manager.interrupt_kernel()
    assert "ranks 0-3 stopped, all variables kept" in kernel.wait(request).reply["evalue"]
    assert (
        kernel.run("procs.run('rank').get().values()").of("execute_result")[0]["data"]["text/plain"] == "[0, 1, 2, 3]"
    )


def test_an_interrupt_of_an_awaited_call_reaches_the_ranks_at_once(kernel: Kernel) -> None:
    kernel.run("%mesh use main --out procs")
    request = kernel.send(f"await procs.run({SLEEP!r})")
    until_all_have_begun(kernel, request)
    pressed = time.monotonic()
    kernel.manager.interrupt_kernel()
    reply = kernel.wait(request).reply
    assert time.monotonic() - pressed < 3
    assert reply["ename"] == "CallInterrupted" and "ranks 0-3 stopped, all variables kept" in reply["evalue"]
    after = kernel.run("(await procs.run('rank')).values()")
    assert after.of("execute_result")[0]["data"]["text/plain"] == "[0, 1, 2, 3]"


def test_an_interrupt_of_calls_that_are_awaited_together_reaches_all_of_them(kernel: Kernel) -> None:
    kernel.run("%mesh use main --out procs")
    request = kernel.send(
        f"import asyncio\nslow = [procs.select([rank]).run({SLEEP!r}) for rank in procs.ranks]\n"
        "await asyncio.gather(*slow)"
    )
    until_all_have_begun(kernel, request)
    pressed = time.monotonic()
    kernel.manager.interrupt_kernel()
    assert kernel.wait(request).reply["status"] == "error"
    assert time.monotonic() - pressed < 4
    assert kernel.run("procs.run('rank').get().values()").reply["status"] == "ok"


def test_a_cell_behind_a_stuck_rank_says_what_it_waits_for_and_is_dropped_by_an_interrupt(kernel: Kernel) -> None:
    kernel.run("%mesh use main --out procs")
    stuck = kernel.send(
        "%%mesh\nimport time\nprint('begun')\nend = time.monotonic() + 8\n"
        "while rank == 3 and time.monotonic() < end:\n    try:\n        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n        end = time.monotonic() + 8; time.sleep(8)"
    )
    until_all_have_begun(kernel, stuck)
    kernel.manager.interrupt_kernel()
    first = kernel.wait(stuck).reply
    number = first["execution_count"]
    assert "rank 3 did not stop: in time.sleep (cell " in first["evalue"]
    waiting = kernel.send("%%mesh\nran = True")
    kernel.until(lambda: f"cell {number + 1} waits for that; an interrupt drops it" in waiting.text(), waiting)
    assert f"rank 3 is still in cell {number}: in time.sleep (cell {number}, line " in waiting.text()
    pressed = time.monotonic()
    kernel.manager.interrupt_kernel()
    second = kernel.wait(waiting).reply
    assert time.monotonic() - pressed < 3
    assert second["ename"] == "CallInterrupted" and second["status"] == "error"
    kernel.run("procs.run('rank').get()")
    ran = kernel.run("procs.run(\"'ran' in globals()\").get().values()").of("execute_result")[0]["data"]["text/plain"]
    assert ran == "[False, False, False, False]"


def test_a_hanging_cell_names_the_rank_and_a_subshell_shows_its_stack(kernel: Kernel) -> None:
    request = kernel.send("%%mesh\nimport time\nif rank == 2:\n    time.sleep(60)\ndist.barrier()")

    def notices() -> list[str]:
        return [data["text/plain"] for data in map(_data_of, request.of("display_data")) if "text/html" in data]

    kernel.until(notices, request)
    (notice,) = notices()
    assert "  rank 2 has issued " in notice and " and is in time.sleep (cell " in notice
    assert notice.endswith("look: %mesh stacks    stop: interrupt"), "for front ends without buttons"
    if (subshell := _new_subshell(kernel)) is not None:  # from ipykernel 7 on
        stacks = kernel.wait(_execute_in(kernel, subshell, "%mesh stacks"))
        assert "[2] busy for " in stacks.text() and "time.sleep(60)\n" in stacks.text()
    kernel.manager.interrupt_kernel()
    assert kernel.wait(request).reply["ename"] == "CallInterrupted"
    (left,) = [data for data in map(_data_of, request.of("update_display_data")) if "text/html" in data]
    assert sorted(left) == ["text/html", "text/plain"], "a saved notebook has no use for the widget"


def _data_of(content: dict[str, Any]) -> dict[str, str]:
    return dict(content["data"])


def test_a_subshell_peeks_into_a_cell_that_runs(kernel: Kernel) -> None:
    request = kernel.send(
        "%%mesh\nimport time\nlosses = []\nprint('begun')\nwhile True:\n    losses.append(0.5)\n    time.sleep(0.01)"
    )
    kernel.until(lambda: "begun" in request.text(), request)
    if (subshell := _new_subshell(kernel)) is not None:  # from ipykernel 7 on
        shown = kernel.wait(_execute_in(kernel, subshell, "%mesh eval --now losses[0]")).text()
        assert shown.startswith("[0-3] 0.5\nat that time: "), shown
        failed = kernel.wait(_execute_in(kernel, subshell, "%mesh eval --now dist.barrier()"))
        assert "barrier is refused in a peek" in "\n".join(failed.reply["traceback"])
    kernel.manager.interrupt_kernel()
    assert kernel.wait(request).reply["ename"] == "CallInterrupted"


@pytest.mark.slow
def test_actors_of_a_class_of_the_notebook_print_fail_and_are_interrupted_in_the_calling_cell(kernel: Kernel) -> None:
    kernel.run("%mesh use main --out procs")
    defined = kernel.run(
        "import time\n"
        "from meshbook.actor import Actor, endpoint\n"
        "class Reader(Actor):\n"
        "    @endpoint\n"
        "    def read(self, name):\n"
        "        print('reading', name)\n"
        "        return name.upper()\n"
        "    @endpoint\n"
        "    def fail(self):\n"
        "        raise ValueError('no shard')\n"
        "    @endpoint\n"
        "    def sleep(self):\n"
        "        time.sleep(60)\n"
        "readers = procs.spawn('readers', Reader)"
    )
    assert defined.reply["status"] == "ok"
    read = kernel.run("readers.read.call('a').get().values()")
    assert by_rank(read.text("stdout")) == each_of(4, "reading a")
    assert read.of("execute_result")[0]["data"]["text/plain"] == "['A', 'A', 'A', 'A']"
    failed = kernel.run("readers.fail.call().get()")
    shown = "\n".join(failed.reply["traceback"])
    assert failed.reply["ename"] == "ActorError"
    assert f"(cell {defined.reply['execution_count']}, line 10)" in failed.reply["evalue"]
    assert "raise" in shown and "no shard" in shown
    waiting = kernel.send("readers.sleep.call().get()")
    time.sleep(1)
    kernel.manager.interrupt_kernel()
    assert kernel.wait(waiting).reply["ename"] == "CallInterrupted"
    listed = kernel.run("%mesh actors")
    assert listed.text() == "readers  Reader  0-3  idle\n"
    assert listed.of("display_data")[0]["data"]["text/html"].count("<td") == 4


def _new_subshell(kernel: Kernel) -> str | None:
    control = kernel.client.control_channel
    sent = kernel.client.session.msg("create_subshell_request")
    control.send(sent)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if control.socket.poll(100):
            reply = control.get_msg(timeout=1)
            if reply["parent_header"].get("msg_id") == sent["header"]["msg_id"]:
                return str(reply["content"]["subshell_id"]) if reply["content"]["status"] == "ok" else None
    return None


def _execute_in(kernel: Kernel, subshell: str, code: str) -> Request:
    content = {"code": code, "silent": False, "store_history": False, "user_expressions": {}, "allow_stdin": False}
    message = kernel.client.session.msg("execute_request", content)
    message["header"]["subshell_id"] = subshell
    kernel.client.shell_channel.send(message)
    request = kernel.requests[message["header"]["msg_id"]] = Request(message["header"]["msg_id"])
    return request


@pytest.mark.slow
def test_tables_and_messages_have_html_beside_their_text(kernel: Kernel) -> None:
    for command in ("list", "stacks", "help"):
        (shown,) = kernel.run(f"%mesh {command}").of("display_data")
        assert "<table" in shown["data"]["text/html"] and "text/plain" in shown["data"], command
    kernel.run("%%mesh --async\nif rank == 1: raise ValueError('bad')")
    kernel.run("%mesh wait")
    for command in ("jobs", "errors"):
        (shown,) = kernel.run(f"%mesh {command}").of("display_data")
        assert "<th " in shown["data"]["text/html"], command
