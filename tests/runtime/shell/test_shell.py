"""The shell of a rank, in real children of a real template process, with pipes for fds 1 and 2.

One long file, because all of it shares one template process and the means to talk to its children.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from patience import wait_until

from meshbook.errors import FailureKind
from meshbook.shell import commands
from meshbook.shell.shell import CellOutcome
from meshbook.wire.messages import JOINS

DEADLINE_S = 60.0


class Ran(NamedTuple):
    """A cell's outcome and all that it showed."""

    outcome: CellOutcome
    stdout: str
    stderr: str
    displays: list[dict[str, Any]]
    late: list[tuple[str, str, int]]

    @property
    def failure(self) -> Any:
        assert self.outcome.failure is not None, self
        return self.outcome.failure

    @property
    def traceback(self) -> str:
        return plain("\n".join(self.failure.traceback))


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


class RankProcess:
    """The test's end of a forked rank."""

    def __init__(self, template: Template, rank: int) -> None:
        (out, out_child), (err, err_child) = os.pipe(), os.pipe()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(template.sock, [b"%d" % rank], [out_child, err_child, theirs.fileno()])
            self.pid = int(template.sock.recv(16))
        os.close(out_child)
        os.close(err_child)
        self._pipes, self._sock = {"out": out, "err": err}, ours
        self._commands = ours.makefile("rwb")
        self._text = {"out": b"", "err": b""}
        self.cells = 0
        self.chunks: list[bytes] = []
        """What each read of a pipe gave."""

    def cell(self, code: str, *, wait: bool = True, **options: Any) -> Any:
        """Run a cell numbered 1, 2, ... with one line above it, its id ten times its number."""
        self.cells += 1
        defaults = {"cell_id": 10 * self.cells, "cell_number": self.cells, "line_offset": 1}
        self.send("run_cell", code, **{**defaults, **options})
        return self.ran() if wait else None

    def ran(self) -> Ran:
        reply = self.receive()
        stdout, stderr = self.take("out"), self.take("err")
        return Ran(reply["outcome"], stdout, stderr, reply["displays"], reply["late"])

    def ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.send(name, *args, **kwargs)
        return self.receive()

    def send(self, name: str, *args: Any, **kwargs: Any) -> None:
        pickle.dump((name, args, kwargs), self._commands)
        self._commands.flush()

    def receive(self) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while self._sock not in self._read(deadline):
            pass
        try:
            reply = pickle.load(self._commands)
        except EOFError:
            raise AssertionError(f"the rank has ended: {self._text}") from None
        while self._read(0.0):
            pass
        return reply

    def interrupt_after(self, text: str) -> Ran:
        """Send SIGINT once the running cell has printed ``text`` and waits in its next line; return how it ended."""
        self.interrupt_once(text)
        return self.ran()

    def interrupt_once(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while text.encode() not in self._text["out"]:
            self._read(deadline)
        time.sleep(0.05)
        os.kill(self.pid, signal.SIGINT)

    def take(self, name: str) -> str:
        data, self._text[name] = self._text[name], b""
        return data.decode()

    def close(self) -> None:
        self._commands.close()
        self._sock.close()
        for fd in self._pipes.values():
            os.close(fd)

    def _read(self, deadline: float) -> list[Any]:
        """Read the pipes that have something; returns what was ready."""
        timeout = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([*self._pipes.values(), self._sock], [], [], timeout)
        assert ready or not deadline, f"no answer; so far: {self._text}"
        seen: list[Any] = [self._sock] if self._sock in ready else []
        for name, fd in self._pipes.items():
            if fd in ready and (data := os.read(fd, 1 << 20)):
                self._text[name] += data
                self.chunks.append(data)
                seen.append(name)
        return [] if seen == [self._sock] and not deadline else seen


class Template:
    def __init__(self, home: Path) -> None:
        self.sock, theirs = socket.socketpair()
        environment = {key: value for key, value in os.environ.items() if key not in ("MPLBACKEND", "IPYTHONDIR")}
        environment |= {"HOME": str(home), "OMP_NUM_THREADS": "1"}
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-W",
                    "error",
                    str(Path(__file__).with_name("rank_template.py")),
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        self.facts = json.loads(self.sock.recv(1 << 20))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    template = Template(tmp_path_factory.mktemp("home"))
    yield template
    template.sock.close()
    assert template.process.wait(DEADLINE_S) == 0


@pytest.fixture
def new_rank(template: Template) -> Iterator[Callable[[int], RankProcess]]:
    made: list[RankProcess] = []

    def make(rank: int) -> RankProcess:
        made.append(RankProcess(template, rank))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


@pytest.fixture
def rank(new_rank: Callable[[int], RankProcess]) -> RankProcess:
    return new_rank(3)


# ---- start ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_construction_starts_no_thread_writes_no_file_and_leaves_the_templates_main_alone(template: Template) -> None:
    assert template.facts["threads"] == 1
    assert template.facts["home"] == []
    assert "A template process" in template.facts["main"]


def test_a_rank_starts_with_its_names_in_a_main_of_its_own(rank: RankProcess) -> None:
    facts = rank.ask("facts")
    assert facts["threads"] == 1 and facts["main"]
    assert rank.cell("rank, __name__, Out is not None").outcome.value == "(3, '__main__', True)"


def test_a_cell_may_rebind_the_names_of_the_rank_and_reset_brings_them_back(rank: RankProcess) -> None:
    assert rank.cell("rank = 'mine'; x = 1; rank").outcome.value == "'mine'"
    ran = rank.cell("%reset -f")
    assert ran.outcome.ok, ran
    assert rank.cell("rank, 'x' in globals()").outcome.value == "(3, False)"


def test_names_that_the_runtime_adds_later_are_like_the_first(rank: RankProcess) -> None:
    rank.ask("define", {"mesh": "of ranks"})
    assert rank.cell("%reset -f\nmesh").outcome.value == "'of ranks'"
    assert rank.cell("mine = 1\n%who").stdout.split() == ["mine"]


# ---- results and displays ---------------------------------------------------------------------------------------


def test_the_last_expression_is_shown_as_a_result_and_kept_in_underscore(rank: RankProcess) -> None:
    ran = rank.cell("x = 20\nx + 1")
    assert (ran.outcome.ok, ran.outcome.has_value, ran.outcome.value) == (True, True, "21")
    [shown] = ran.displays
    assert shown["data"] == {"text/plain": "21"} and shown["is_result"] and shown["cell_id"] == 10
    assert rank.cell("_, Out[1], _1").outcome.value == "(21, 21, 21)"
    assert not rank.cell("x = 1").outcome.has_value
    assert rank.cell("x;").displays == []


def test_outputs_are_numbered_as_in_the_notebook(rank: RankProcess) -> None:
    rank.cell("'seventh'", cell_number=7)
    assert rank.cell("Out[7], In[7]", cell_number=9).outcome.value == """('seventh', "'seventh'")"""


def test_displays_behind_clear_output_replace_the_earlier_ones(rank: RankProcess) -> None:
    ran = rank.cell(
        "from IPython.display import clear_output\n"
        "for number in range(2):\n    display(number)\n    display(number, display_id='own')\n"
        "    clear_output(wait=True)\n"
        "display('last')\nclear_output()"
    )
    shown = [(d["data"]["text/plain"], d["update"], d["transient"]["display_id"] == "own") for d in ran.displays]
    assert shown == [
        ("0", False, False), ("0", False, True),
        ("1", True, False), ("1", False, True),
        ("'last'", True, False), ("", True, False),
    ]  # fmt: skip
    assert len({d["transient"]["display_id"] for d in ran.displays}) == 2
    assert rank.cell("display(1)").displays[0]["transient"] == {}


def test_display_publishes_all_mimetypes_and_updates(rank: RankProcess) -> None:
    ran = rank.cell(
        "class Rich:\n"
        "    def _repr_html_(self): return '<b>rich</b>'\n"
        "    def _repr_png_(self): return b'png'\n"
        "    def __repr__(self): return 'rich'\n"
        "handle = display(Rich(), display_id='shown')\n"
        "handle.update('later')\n"
    )
    first, second = ran.displays
    assert first["data"] == {"text/plain": "rich", "text/html": "<b>rich</b>", "image/png": "cG5n"}
    assert not first["is_result"] and not first["update"] and first["transient"] == {"display_id": "shown"}
    assert second["update"] and second["data"]["text/plain"] == "'later'"


def test_text_comes_before_the_display_that_follows_it(rank: RankProcess) -> None:
    ran = rank.cell("print('unfinished', end='')\ndisplay(1)\nprint('after')")
    assert ran.stdout == "unfinished<display>\nafter\n"


def test_a_result_that_cannot_be_shown_fails_the_cell(rank: RankProcess) -> None:
    """Other ranks may wait in its representation."""
    ran = rank.cell("class Broken:\n    def __repr__(self): raise ValueError('no words')\nBroken()")
    assert (ran.failure.ename, ran.failure.evalue, ran.displays) == ("ValueError", "no words", [])
    ran = rank.cell("Broken._repr_html_ = lambda self: 'words'\nBroken()")
    assert ran.outcome.ok and ran.displays[0]["data"]["text/html"] == "words"
    assert "no words" in ran.stderr
    assert rank.cell("1 + 1").outcome.value == "2"


def test_long_representations_are_cut_with_their_length(rank: RankProcess) -> None:
    text = rank.cell("'x' * 1_000_000").displays[0]["data"]["text/plain"]
    assert len(text) < 101_000 and text.endswith("(cut; 1,000,002 characters in all)")


def test_question_marks_show_help(rank: RankProcess) -> None:
    rank.cell('def greet(name):\n    """Say hello."""\n    return f"hello {name}"')
    [shown] = rank.cell("greet?").displays
    assert "Say hello." in plain(shown["data"]["text/plain"])
    [shown] = rank.cell("greet??").displays
    assert 'return f"hello {name}"' in plain(shown["data"]["text/plain"])


@pytest.mark.slow
def test_figures_are_shown_at_the_end_of_the_cell_without_being_asked_for(rank: RankProcess) -> None:
    pytest.importorskip("matplotlib")
    ran = rank.cell(
        "import warnings; warnings.simplefilter('ignore')\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);"
    )
    assert [sorted(shown["data"]) for shown in ran.displays] == [["image/png", "text/plain"]], ran
    assert ran.displays[0]["data"]["image/png"].startswith("iVBOR")
    assert rank.cell("1").displays[0]["is_result"]
    rank.ask("evaluate_and_flush", "plt.plot([2, 1])")
    assert rank.cell("%matplotlib inline\nplt.plot([1]); plt.show()").displays[-1]["cell_id"] == 30


def test_capture_and_widgets_of_ipython_work(rank: RankProcess) -> None:
    ran = rank.cell("%%capture seen\nprint('hidden')\ndisplay(5)\n6")
    assert ran.outcome.ok and ran.stdout == "" and ran.displays == []
    assert rank.cell("seen.stdout, len(seen.outputs)").outcome.value == "('hidden\\n', 2)"


# ---- magics and commands ----------------------------------------------------------------------------------------


def test_magics_work(rank: RankProcess, tmp_path: Path) -> None:
    assert "loop" in rank.cell("%timeit -n 1 -r 1 1 + 1").stdout
    assert "Wall time" in rank.cell("%%time\nsum(range(10))").stdout
    assert str(tmp_path) in rank.cell(f"%cd {tmp_path}").stdout
    rank.cell("%%writefile module_of_mine.py\nanswer = 42")
    assert rank.cell("%run module_of_mine.py\nanswer").outcome.value == "42"
    assert rank.cell("import warnings; warnings.simplefilter('ignore')\n%load_ext autoreload\n%autoreload 2").outcome.ok
    assert "UsageError" in rank.cell("%nonsense").failure.ename


@pytest.mark.parametrize("how", ["{file}", "-i {file}", "-m {module}", "-e {file}"])
def test_an_error_ends_a_script_and_the_cell_that_runs_it(rank: RankProcess, tmp_path: Path, how: str) -> None:
    rank.cell(f"%cd {tmp_path}\nimport sys; sys.path.insert(0, ''); after = 0")
    (tmp_path / "script_of_mine.py").write_text("import sys\n1 / 0\n")
    line = "%run " + how.format(file="script_of_mine.py", module="script_of_mine")
    ran = rank.cell(f"{line}\nafter = 1")
    assert ran.failure.ename == "ZeroDivisionError" and ran.stderr == ""
    assert "script_of_mine.py" in ran.traceback and "safe_execfile" not in ran.traceback
    assert rank.cell("after").outcome.value == "0"


def test_a_script_that_exits_with_an_error_fails_the_cell(rank: RankProcess, tmp_path: Path) -> None:
    rank.cell(f"%cd {tmp_path}")
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    assert rank.cell("%run ends.py 3").failure.ename == "SystemExit"
    assert rank.cell("%run ends.py 0").outcome.ok and rank.cell("%run -e ends.py 3").outcome.ok


def test_a_cell_within_the_cell_fails_it(rank: RankProcess) -> None:
    ran = rank.cell("get_ipython().run_cell('1 / 0')\nprint('went on')")
    assert ran.failure.ename == "ZeroDivisionError" and ran.stdout == "went on\n"


def test_no_library_takes_a_rank_for_a_person(rank: RankProcess) -> None:
    assert rank.cell("import sys\nhasattr(sys, 'ps1')").outcome.value == "False"


def test_commands_write_to_the_pipes_in_order_and_expand_names(rank: RankProcess) -> None:
    ran = rank.cell("word = 'middle'\nprint('first')\n!echo $word; echo problem >&2\nprint('last')")
    assert (ran.stdout, ran.stderr) == ("first\nmiddle\nlast\n", "problem\n")
    assert rank.cell("!exit 3\n_exit_code").outcome.value == "3"
    assert rank.cell("lines = !printf 'a\\nb\\n'\nlist(lines)").outcome.value == "['a', 'b']"
    assert rank.cell("!cat").outcome.ok  # stdin is empty, not a hang


def test_script_magics_show_their_text_in_order_and_with_their_own_cell(rank: RankProcess) -> None:
    for word in ("one", "two"):
        ran = rank.cell(f"%%bash\nsh -c 'echo before'; echo {word}")
        assert (ran.stdout, ran.late) == (f"before\n{word}\n", [])
        ran = rank.cell(f"%%script python3\nprint('{word}')")
        assert (ran.stdout, ran.late) == (f"{word}\n", [])
    assert rank.cell("%%bash --out text\necho kept").outcome.ok
    assert rank.cell("text").outcome.value == "'kept\\n'"
    assert "exit status 3" in rank.cell("%%sh\nexit 3").failure.evalue


def test_a_shell_that_is_interrupted_bit_by_bit_runs_no_further_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine processes get their signals one by one; a shell goes on when its pipeline ends well first."""
    kill = os.kill

    def kill_slowly(pid: int, signum: int) -> None:
        kill(pid, signum)
        time.sleep(0.02)

    with subprocess.Popen(["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdin is not None and shell.stdout is not None
        shell.stdin.write("(sleep 77 | cat; true); echo unreachable\n")
        shell.stdin.close()
        wait_until(
            lambda: {"sleep", "cat"} <= {child.name() for child in psutil.Process(shell.pid).children(recursive=True)},
            timeout_s=60,
        )
        monkeypatch.setattr(commands.os, "kill", kill_slowly)
        commands._end(shell)  # type: ignore[arg-type]
        assert shell.stdout.read() == ""


# ---- awaiting ---------------------------------------------------------------------------------------------------


def test_cells_await_on_one_loop_whose_tasks_survive(rank: RankProcess) -> None:
    rank.cell(
        "import asyncio\nqueue = asyncio.Queue()\n"
        "async def work():\n    await queue.put((await queue.get()) * 2); await asyncio.sleep(60)\n"
        "task = asyncio.create_task(work())\nawait asyncio.sleep(0)"
    )
    assert rank.cell("await queue.put(21)\nawait asyncio.sleep(.01)\nawait queue.get()").outcome.value == "42"
    assert rank.cell("asyncio.run(asyncio.sleep(0, 'own loop'))").outcome.value == "'own loop'"
    assert rank.cell("await asyncio.sleep(0, task.done())").outcome.value == "False"


def test_an_interrupt_cancels_an_awaiting_cell_and_the_loop_stays_usable(rank: RankProcess) -> None:
    rank.cell("import asyncio\nawait asyncio.sleep(0)")
    rank.cell("print('ready')\ntry:\n    await asyncio.sleep(60)\nfinally:\n    print('cleaned')", wait=False)
    ran = rank.interrupt_after("ready")
    assert ran.outcome.interrupted and ran.failure.ename == "KeyboardInterrupt" and "cleaned" in ran.stdout
    assert ran.failure.where == "cell 2, line 4"
    assert rank.cell("await asyncio.sleep(.01, 'again')").outcome.value == "'again'"


def test_a_second_interrupt_cancels_a_cell_that_has_ignored_the_first(rank: RankProcess) -> None:
    rank.cell(
        "import asyncio\nprint('ready')\n"
        "try:\n    await asyncio.sleep(60)\n"
        "except asyncio.CancelledError:\n    print('stubborn')\n    await asyncio.sleep(60)",
        wait=False,
    )
    rank.interrupt_once("ready")
    assert rank.interrupt_after("stubborn").outcome.interrupted
    assert rank.cell("await asyncio.sleep(.01, 'again')").outcome.value == "'again'"


# ---- what cannot work on a rank ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", ["input('name? ')", "breakpoint()", "%pdb on", "import pdb; pdb.set_trace()", "%debug 1 + 1"]
)
def test_nothing_waits_for_someone_to_type(rank: RankProcess, code: str) -> None:
    rank.cell("1")
    ran = rank.cell(code)
    if code.startswith(("input", "breakpoint", "%pdb")):
        assert "not available on ranks" in ran.failure.evalue
    assert rank.cell("1").outcome.ok


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "exit()", "exit", "quit", "raise SystemExit"])
def test_exiting_ends_the_cell_only(rank: RankProcess, code: str) -> None:
    ran = rank.cell(code)
    assert ran.failure.kind is (FailureKind.RAISED if "3" in code else FailureKind.EXITED)
    assert ran.failure.ename == "SystemExit" and "ended the cell, not the rank" in ran.failure.evalue
    assert "not the rank" in ran.traceback and ran.stderr == ""
    assert rank.cell("1").outcome.ok


# ---- errors -----------------------------------------------------------------------------------------------------


def test_an_error_shows_the_notebooks_lines_and_none_of_our_frames(rank: RankProcess) -> None:
    rank.cell("def half(x):\n    return x / 0\n")
    ran = rank.cell("\n\nvalue = 1\nhalf(value)\n", line_offset=2)
    assert ran.failure[:4] == (3, "a", "ZeroDivisionError", "division by zero")
    assert ran.failure.where == "cell 1, line 3"
    assert "6 half(value)" in ran.traceback and "3     return x / 0" in ran.traceback
    if "Cell" in ran.traceback:  # IPython 7 prints file names only
        assert "Cell [2], line 6" in ran.traceback
    assert "meshbook" not in ran.traceback and "IPython" not in ran.traceback
    assert "\x1b[" in "".join(ran.failure.traceback)
    assert ran.stdout == ran.stderr == ""


def test_equal_errors_on_two_ranks_are_equal(new_rank: Callable[[int], RankProcess]) -> None:
    failures = []
    for number in range(2):
        rank = new_rank(number)
        rank.cell("def f(x):\n    raise ValueError('bad shard')")
        failures.append(rank.cell("f(1)").failure)
    assert failures[0].cause == failures[1].cause and failures[0].traceback == failures[1].traceback
    assert [failure.rank for failure in failures] == [0, 1]


def test_a_syntax_error_shows_its_line_and_caret(rank: RankProcess) -> None:
    ran = rank.cell("x = 1\ny = = 2\n")
    assert (ran.failure.ename, ran.failure.evalue) == ("SyntaxError", "invalid syntax")
    assert ran.failure.where == "cell 1, line 3"
    assert re.search(r"line 3|:3", ran.traceback) and re.search(r"y = = 2\n +\^", ran.traceback)
    assert rank.cell("def f():\nreturn 1").failure.where == "cell 2, line 3"
    outside = rank.cell("x = 1\nreturn x")
    assert outside.failure.ename == "SyntaxError" and outside.failure.where == "cell 3, line 3"


def test_errors_in_captured_cells_are_shown_with_the_notebooks_lines(rank: RankProcess) -> None:
    assert re.search(r"(line |:|> )4", plain(rank.cell("%%capture\nx = 1\n1 / 0\n").traceback))
    rank.cell("%%capture\nimport os, time; os.write(1, b'set\\n'); time.sleep(60)", wait=False)
    assert rank.interrupt_after("set").outcome.interrupted


def test_a_cell_without_a_number_is_a_cell(rank: RankProcess) -> None:
    ran = rank.cell("1 / 0", cell_number=None, line_offset=0)
    assert ran.failure.where == "a cell, line 1"
    ran = rank.cell("get_ipython().run_cell('1 / 0').raise_error()")
    assert ran.failure.where == "a cell, line 1"


def test_two_cells_of_one_number_keep_their_own_sources(rank: RankProcess) -> None:
    rank.cell("def f():\n    return 'first'", cell_number=5)
    rank.cell("def g():\n    return 'second'", cell_number=5)
    ran = rank.cell("import inspect\nprint(inspect.getsource(f) + inspect.getsource(g))")
    assert "'first'" in ran.stdout and "'second'" in ran.stdout


def test_functions_of_cells_have_source_and_travel_by_value(rank: RankProcess) -> None:
    ran = rank.cell(
        "import cloudpickle, inspect, pickle, linecache\n"
        "def double(x):\n    # a comment\n    return 2 * x\n"
        "copy = pickle.loads(cloudpickle.dumps(double))\ncopy(4), inspect.getsource(double)"
    )
    assert ran.outcome.value == repr((8, "def double(x):\n    # a comment\n    return 2 * x\n"))


def test_long_messages_and_deep_tracebacks_are_cut(rank: RankProcess) -> None:
    failure = rank.cell("raise ValueError('x' * 10_000_000)").failure
    assert len(failure.evalue) < 5000 and "10,000,000 characters" in failure.evalue
    assert sum(map(len, failure.traceback)) < 20_000
    deep = rank.cell("def down(n):\n    return up(n)\ndef up(n):\n    return down(n)\ndown(1)")
    assert deep.failure.ename == "RecursionError" and sum(map(len, deep.failure.traceback)) < 400_000


def test_errors_that_cannot_be_printed_are_still_failures(rank: RankProcess) -> None:
    ran = rank.cell("class Mute(Exception):\n    def __str__(self): raise RuntimeError\nraise Mute")
    assert ran.failure.ename == "Mute" and "cannot be had" in ran.failure.evalue
    groups = sys.version_info >= (3, 11)
    if groups:
        ran = rank.cell("raise ExceptionGroup('several', [ValueError('one'), KeyError('two')])")
        assert "ValueError: one" in ran.traceback and "meshbook" not in ran.traceback


def test_causes_are_shown_and_the_exception_is_handed_over(rank: RankProcess) -> None:
    ran = rank.cell("try:\n    {}['key']\nexcept KeyError as error:\n    raise ValueError('no key') from error")
    assert "KeyError: 'key'" in ran.traceback and "direct cause" in ran.traceback
    assert ran.failure.exception == repr(ValueError("no key"))


def test_what_user_code_shows_itself_is_printed_and_the_cell_is_ok(rank: RankProcess) -> None:
    ran = rank.cell("try:\n    1 / 0\nexcept ZeroDivisionError:\n    get_ipython().showtraceback()\n'on'")
    assert ran.outcome.value == "'on'" and "ZeroDivisionError" in ran.stderr
    ran = rank.cell(
        "def callback(): raise OSError('in callback')\nget_ipython().events.register('post_execute', callback)"
    )
    assert ran.outcome.ok and "in callback" in ran.stderr


def test_describe_makes_failures_of_calls_outside_of_cells(rank: RankProcess) -> None:
    rank.cell("def f():\n    return missing")
    failure = rank.ask("describe", "f()")
    assert (failure.ename, failure.where) == ("NameError", "cell 1, line 3")
    assert "runtime/meshbook" not in plain("".join(failure.traceback))


def test_the_last_error_is_kept_for_postmortem_until_the_next_one(rank: RankProcess) -> None:
    rank.cell(
        "import weakref, gc, sys\nclass Big: pass\n"
        "def hold():\n    global seen\n    big = Big(); seen = weakref.ref(big)\n    raise ValueError('held')"
    )
    rank.cell("hold()")
    assert rank.ask("evaluate", "str(sys.last_value)") == "held"
    assert rank.ask("evaluate", "'big' in sys.last_traceback.tb_next.tb_frame.f_locals")
    assert rank.cell("seen() is None").outcome.value == "False"
    rank.cell("1 / 0")
    assert rank.cell("gc.collect(); seen() is None, str(sys.last_value)").outcome.value == "(True, 'division by zero')"


# ---- interrupts -------------------------------------------------------------------------------------------------


def test_an_interrupt_ends_the_cell_and_keeps_the_names(rank: RankProcess) -> None:
    rank.cell("kept = 1\nprint('ready')\nwhile True: pass", wait=False)
    ran = rank.interrupt_after("ready")
    assert ran.outcome.interrupted and not ran.outcome.ok and ran.failure.ename == "KeyboardInterrupt"
    assert ran.failure.where.startswith("cell 1, line 4")
    assert rank.cell("kept").outcome.value == "1"


def test_an_interrupt_in_a_callback_of_ipython_interrupts_the_cell(rank: RankProcess) -> None:
    rank.cell(
        "import time\ndef callback(): print('ready'); time.sleep(60)\n"
        "events = get_ipython().events; events.register('post_execute', callback)",
        wait=False,
    )
    assert rank.interrupt_after("ready").outcome.interrupted


# ---- text -------------------------------------------------------------------------------------------------------


def test_python_c_and_children_print_in_order(rank: RankProcess) -> None:
    ran = rank.cell(
        "import ctypes, subprocess, os, sys\nlibc = ctypes.CDLL(None)\n"
        "print('python'); libc.puts(b'c')\nsubprocess.run(['echo', 'child']); os.write(1, b'fd\\n')\n"
        "sys.stdout.buffer.write(b'bytes\\n'); print('python again'); n = libc.printf(b'c unfinished')"
    )
    assert ran.stdout == "python\nc\nchild\nfd\nbytes\npython again\nc unfinished"


def test_streams_look_like_files_that_are_no_terminals(rank: RankProcess) -> None:
    value = rank.cell(
        "import sys\nsys.stdout.reconfigure(encoding='utf-8')\n"
        "sys.stdout.isatty(), sys.stderr.isatty(), sys.stdout.fileno(), sys.stderr.fileno(), sys.stdout.encoding"
    ).outcome.value
    assert value == "(False, False, 1, 2, 'utf-8')"
    ran = rank.cell("print('\\ud800 é', file=sys.stderr)\nsys.stdout.close(); print('open')")
    assert ran.stderr == "\\ud800 é\n" and ran.stdout == "open\n"
    assert "argument must be str" in rank.cell("sys.stdout.write(b'x')").failure.evalue


def test_a_line_is_one_write_and_partial_lines_come_with_a_flush(rank: RankProcess) -> None:
    rank.cell(
        "import fcntl, os, sys\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_DIRECT | os.O_WRONLY)"
    )  # a read gives one write
    rank.chunks.clear()
    rank.cell(
        "print('one', 'line', 2)\nprint('part', end='')\nprint('ial', flush=True, end='')\nprint('\\rbar', end='')"
    )
    assert rank.chunks == [b"one line 2\n", b"partial", b"\rbar"]


def test_an_interrupt_in_a_flood_loses_no_line(rank: RankProcess) -> None:
    rank.cell("i = 0\nwhile True:\n    print('ready', i)\n    i += 1", wait=False)
    ran = rank.interrupt_after("ready 20000\n")
    numbers = [int(line.split()[1]) for line in ran.stdout.splitlines()[:-1]]  # the last line may be half of one
    assert ran.outcome.interrupted and numbers == list(range(len(numbers)))


MANY = "import sys\nfor number in range(100): print('many', number)\nassert 'write' in vars(sys.stdout)\n"
"""So many lines in a row that they take the shorter way (`meshbook.shell.attribution`)."""

MANY_TEXT = "".join(f"many {number}\n" for number in range(100))


def test_many_lines_stand_in_order_with_c_children_bytes_and_the_other_stream(rank: RankProcess) -> None:
    ran = rank.cell(
        f"import ctypes, subprocess, os\nlibc = ctypes.CDLL(None)\n{MANY}libc.puts(b'c'); print('python')\n"
        f"{MANY}subprocess.run(['echo', 'child']); print('begun', end=''); os.write(1, b'fd\\n')\n"
        f"{MANY}sys.stdout.buffer.write(b'bytes\\n'); print('bad', file=sys.stderr); print('python again')\n"
        f"{MANY}print('unfinished', end='')\ndisplay(1)\n{MANY}print('part', end='')"
    )
    assert ran.stdout == (
        f"{MANY_TEXT}c\npython\n{MANY_TEXT}child\nfd\nbegun{MANY_TEXT}bytes\npython again\n"
        f"{MANY_TEXT}unfinished<display>\n{MANY_TEXT}part"
    )
    assert ran.stderr == "bad\n"


def test_many_lines_go_where_a_cell_leads_them_meanwhile(rank: RankProcess, tmp_path: Path) -> None:
    path = tmp_path / "text"
    ran = rank.cell(
        f"import os\nkept = os.dup(1); file = os.open({str(path)!r}, os.O_WRONLY | os.O_CREAT)\n"
        f"{MANY}os.dup2(file, 1); print('to the file')\nfor number in range(100): print(number)\n"
        "import ctypes; ctypes.CDLL(None).dup2(kept, 1); os.close(kept); os.close(file)\n"
        f"{MANY}os.close(1); print('closed')"
    )
    assert ran.stdout == f"{MANY_TEXT}{MANY_TEXT}closed\n", ran
    assert path.read_text() == "to the file\n" + "".join(f"{number}\n" for number in range(100))


@pytest.mark.parametrize(("before", "text"), [("", ""), (MANY, MANY_TEXT)], ids=["few", "many"])
def test_a_pipe_that_is_made_non_blocking_loses_nothing(rank: RankProcess, before: str, text: str) -> None:
    ran = rank.cell(
        f"import fcntl, os\n{before}fcntl.fcntl(1, fcntl.F_SETFL, os.O_NONBLOCK | os.O_WRONLY)\n"
        "for i in range(20_000): print('x' * 7)\nprint('y' * 1_000_000)"
    )
    assert ran.outcome.ok, ran.failure
    assert ran.stdout == text + "xxxxxxx\n" * 20_000 + "y" * 1_000_000 + "\n"


def test_after_many_lines_threads_tasks_and_forks_print_as_ever(rank: RankProcess) -> None:
    rank.cell(
        "import asyncio, multiprocessing, threading, warnings\nwarnings.simplefilter('ignore')\n"
        "go = threading.Event()\nloop = asyncio.new_event_loop()\n"
        "async def work(): print('of the task')\ntask = loop.create_task(work())"
    )
    ran = rank.cell(
        f"{MANY}print('begun ', end='')\nthread = threading.Thread(target=lambda: (go.wait(), print('of it')))\n"
        f"thread.start()\nfor number in range(100): print(number)\nassert 'write' not in vars(sys.stdout)\n"
        f"go.set(); thread.join()\n{MANY}loop.run_until_complete(task); print('mine')\n"
        f"{MANY}print('once, ', end='')\n"
        "child = multiprocessing.get_context('fork').Process(target=lambda: print('child'))\n"
        "child.start(); child.join()"
    )
    assert ran.outcome.ok, ran.failure
    numbers = "".join(f"{number}\n" for number in range(100))
    assert ran.stdout == f"{MANY_TEXT}begun {numbers}of it\n{MANY_TEXT}mine\n{MANY_TEXT}once, child\n", ran.stdout
    assert ran.late == [("stdout", "of the task\n", 10)]


def test_a_write_that_was_bound_before_many_lines_keeps_the_order(rank: RankProcess) -> None:
    ran = rank.cell(f"import sys\nwrite = sys.stdout.write\n{MANY}print('a', end=''); n = write('b\\n'); print('c')")
    assert ran.stdout == f"{MANY_TEXT}ab\nc\n"
    ran = rank.cell(f"{MANY}write = sys.stdout.write\nprint('e', file=sys.stderr); n = write('a'); print('b')")
    assert (ran.stdout, ran.stderr) == (f"{MANY_TEXT}ab\n", "e\n")
    assert "argument must be str" in rank.cell(f"{MANY}sys.stdout.write(b'x')").failure.evalue


def test_a_write_that_was_bound_in_many_lines_knows_whose_text_it_is(rank: RankProcess) -> None:
    ran = rank.cell(
        f"import threading\ngo, done = threading.Event(), threading.Event()\n{MANY}write = sys.stdout.write\n"
        "thread = threading.Thread(target=lambda: (go.wait(), write('late\\n'), write('more\\n'), done.set()))\n"
        "thread.start()"
    )
    assert ran.stdout == MANY_TEXT
    ran = rank.cell("go.set(); thread.join(); print('mine')")
    assert (ran.stdout, "".join(text for _, text, _ in ran.late)) == ("mine\n", "late\nmore\n")
    assert {cell for _, _, cell in ran.late} == {10}


def test_the_lines_of_one_print_stay_together_amid_many_lines(rank: RankProcess) -> None:
    ran = rank.cell(f"{MANY}print('a\\nb')\nassert 'write' not in vars(sys.stdout)\n{MANY}print(end='', flush=True)")
    assert ran.outcome.ok, ran.failure
    assert ran.stdout == f"{MANY_TEXT}a{JOINS}\nb\n{MANY_TEXT}"


def test_long_lines_and_bytes_stand_in_order_amid_many_lines(rank: RankProcess) -> None:
    ran = rank.cell(
        f"{MANY}print('y' * 300_000)\n"
        f"{MANY}sys.stdout.buffer.write(b'bytes' * 50_000); print()\n{MANY}print('é' * 3000)"
    )
    assert ran.stdout == f"{MANY_TEXT}{'y' * 300_000}\n{MANY_TEXT}{'bytes' * 50_000}\n{MANY_TEXT}{'é' * 3000}\n"


def test_what_is_printed_unheard_is_dropped_amid_many_lines(rank: RankProcess) -> None:
    ran = rank.cell(
        "import sys, threading\nfrom meshbook.concurrency.background import hidden_thread\n"
        "entered, goes_on = threading.Event(), threading.Event()\n"
        "def complete():\n    with sys.stdout._attribution.unheard():\n"
        "        entered.set(); goes_on.wait(); print('noise')\n"
        f"thread = hidden_thread(complete, 'beside')\n{MANY}print('begun ', end='')\nthread.start(); entered.wait()\n"
        "for number in range(100): print(number)\nassert 'write' not in vars(sys.stdout)\n"
        f"goes_on.set(); thread.join()\n{MANY}"
    )
    assert ran.outcome.ok, ran.failure
    numbers = "".join(f"{number}\n" for number in range(100))
    assert ran.stdout == f"{MANY_TEXT}begun {numbers}{MANY_TEXT}", ran.stdout


def test_threads_of_a_cell_print_into_it_and_later_ones_as_late_text(rank: RankProcess) -> None:
    ran = rank.cell(
        "import threading\ngo, done = threading.Event(), threading.Event()\n"
        "def work():\n    print('at once'); go.wait(); print('la', end=''); print('te'); display('rich'); done.set()\n"
        "thread = threading.Thread(target=work); thread.start()\nimport time; time.sleep(.05)"
    )
    assert (ran.stdout, ran.late) == ("at once\n", [])
    ran = rank.cell("go.set(); done.wait(); print('mine')")
    assert ran.stdout.replace("<display>\n", "") == "mine\n"
    assert ran.late == [("stdout", "late\n", 10)]
    assert [shown["cell_id"] for shown in ran.displays] == [10]


def test_text_of_a_thread_is_late_after_its_cell_has_ended_too(rank: RankProcess) -> None:
    rank.cell(
        "import threading, time, sys\ndef work(): time.sleep(.05); print('after', file=sys.stderr)\n"
        "thread = threading.Thread(target=work); thread.start()"
    )
    rank.ask("evaluate", "thread.join()")
    assert rank.ask("late") == [("stderr", "after\n", 10)]


def test_threads_started_by_late_threads_belong_to_the_same_cell(rank: RankProcess) -> None:
    rank.cell(
        "import threading\ngo = threading.Event()\n"
        "def inner(): print('inner')\n"
        "def outer():\n    go.wait(); t = threading.Thread(target=inner); t.start(); t.join()\n"
        "thread = threading.Thread(target=outer); thread.start()"
    )
    assert rank.cell("go.set(); thread.join()").late == [("stdout", "inner\n", 10)]


def test_tasks_print_as_the_cell_that_made_them(rank: RankProcess) -> None:
    rank.cell(
        "import asyncio\ngo = asyncio.Event()\nasync def work():\n    await go.wait(); print('of the task')\n"
        "task = asyncio.create_task(work())\nawait asyncio.sleep(0)"
    )
    ran = rank.cell("print('of the cell')\ngo.set(); await task")
    assert ran.stdout == "of the cell\n" and ran.late == [("stdout", "of the task\n", 10)]


def test_forked_children_print_to_the_pipes_and_leave_the_sink_alone(rank: RankProcess) -> None:
    ran = rank.cell(
        "import multiprocessing, warnings\nwarnings.simplefilter('ignore')\n"
        "def work(): print('child'); display('shown')\n"
        "print('partial', end='')\n"
        "child = multiprocessing.get_context('fork').Process(target=work); child.start(); child.join(); child.exitcode"
    )
    assert ran.outcome.value == "0", ran
    assert [shown["is_result"] for shown in ran.displays] == [True]
    assert ran.stdout.count("partial") == 1 and "child\n'shown'\n" in ran.stdout


# ---- collectives ------------------------------------------------------------------------------------------------

COLLECTIVES = {
    "all_reduce": "dist.all_reduce(t)",
    "barrier": "dist.barrier()",
    "broadcast": "dist.broadcast(t, 0)",
    "all_gather": "dist.all_gather([t.clone()], t)",
    "all_gather_into_tensor": "dist.all_gather_into_tensor(t.clone(), t)",
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(t.clone(), t)",
    "all_to_all_single": "dist.all_to_all_single(t.clone(), t)",
    "scatter": "dist.scatter(t, [t.clone()], 0)",
    "reduce": "dist.reduce(t, 0)",
    "gather": "dist.gather(t, [t.clone()], 0)",
    "send": "dist.distributed_c10d._get_default_group().send([t], 0, 0)",
    "recv": "dist.distributed_c10d._get_default_group().recv([t], 0, 0)",
    "all_reduce ": "import torch.distributed._functional_collectives as f; f.all_reduce(t, 'sum', dist.group.WORLD)",
    "all_gather_into_tensor ": "f.all_gather_tensor(t, 0, dist.group.WORLD)",
    "broadcast ": "dist.broadcast_object_list([1], 0)",
}


@pytest.mark.slow
def test_forbidden_collectives_raise_at_once_and_only_in_that_cell(rank: RankProcess, tmp_path: Path) -> None:
    started = rank.cell(
        "import warnings; warnings.simplefilter('ignore')\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "t = torch.ones(2)\ndist.all_reduce(t); t.tolist()"
    )
    assert started.outcome.value == "[1.0, 1.0]", started
    for operation, code in COLLECTIVES.items():
        ran = rank.cell(code, forbid_collectives=True)
        assert f"collectives are off in this cell (--no-collective): {operation.strip()}" in ran.failure.evalue, code
        assert ran.failure.where.endswith("line 2")
    assert rank.cell("(t @ t).item()", forbid_collectives=True).outcome.value == "2.0"
    assert rank.cell("dist.all_reduce(t); dist.barrier(); t.tolist()").outcome.value == "[1.0, 1.0]"
    assert rank.cell("dist.destroy_process_group()").outcome.ok
