"""What a thread is said to do."""

from __future__ import annotations

import gc
import linecache
import queue
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from meshbook import ProcMesh
from meshbook.source.location import Activity, add_cell, describe_frame, frame_activity, name_call, name_place
from meshbook.source.thread_frames import frame_of, frames

names_c_calls = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of instructions, Python 3.11")


def watch(source: str, filename: str, until: str, **names: object) -> str:
    """Run ``source`` as ``filename`` on a thread; say what it does once that names ``until``."""
    gate: queue.SimpleQueue[None] = queue.SimpleQueue()
    thread = threading.Thread(target=exec, args=(compile(source, filename, "exec"), {"gate": gate, **names}))
    thread.start()
    try:
        deadline = time.monotonic() + 5
        while until not in (seen := describe_frame(sys._current_frames().get(thread.ident or 0))):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        time.sleep(0.02)
        return describe_frame(sys._current_frames().get(thread.ident or 0)) if until in seen else seen
    finally:
        gate.put(None)
        thread.join()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], tuple[str, str]]:
    def write(text: str) -> tuple[str, str]:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        linecache.checkcache(str(path))
        return path.read_text(), str(path)

    return write


@names_c_calls
def test_a_call_into_c_is_named_as_the_source_names_it(script: Callable[[str], tuple[str, str]]) -> None:
    seen = watch(*script("x = 1\nx = gate.get() or x"), until="train.py:2")
    assert seen == "in gate.get (train.py:2)"


@names_c_calls
def test_a_cell_is_named_by_its_number() -> None:
    source = "\n\n\n\ngate.get()"
    assert watch(source, add_cell(source, 7), until="line 5") == "in gate.get (cell 7, line 5)"


def test_the_place_is_the_innermost_line_of_the_users_own_code(script: Callable[[str], tuple[str, str]]) -> None:
    code = """\
    import threading
    def step():
        threading.Event().wait(0.5)
    step()
    """
    assert watch(*script(code), until="train.py:3").endswith("train.py:3)" if sys.version_info >= (3, 11) else ":3")


def test_a_call_spread_over_lines_is_placed_without_a_name(script: Callable[[str], tuple[str, str]]) -> None:
    assert watch(*script("(gate\n  .get\n  ())"), until="train.py").startswith("at train.py:")


def test_the_kind_of_code_is_known_without_its_description() -> None:
    assert frame_activity(sys._getframe()) is Activity.CODE
    assert frame_activity(None) is Activity.RUNTIME


def test_no_frame_is_idle() -> None:
    assert describe_frame(None) == "idle"


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("time.sleep(60)", "time.sleep"),
        ("build(x).fit(y, (1, 2))", "fit"),
        ("gate", ""),
        ("(lambda: 3)()", ""),
        ("table[3](4)", ""),
    ],
)
def test_the_name_of_a_call_is_read_from_its_text(expression: str, name: str) -> None:
    assert name_call(expression) == name


def test_places_are_short() -> None:
    assert name_place("/home/me/train.py", 41) == "train.py:41"
    assert name_place(add_cell("1 + 1", 12), 3) == "cell 12, line 3"


def test_a_line_of_the_kernels_own_cell_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x = 1\ny = x / 0\n"
    monkeypatch.setitem(linecache.cache, "/tmp/ipykernel_1/2.py", (len(text), None, text.splitlines(True), "2.py"))
    assert name_place("/tmp/ipykernel_1/2.py", 2) == "2.py:2"
    monkeypatch.setattr(sys.modules["__main__"], "In", ["", "x = 1", text], raising=False)
    assert name_place("/tmp/ipykernel_1/2.py", 2) == "cell 2, line 2"


def test_names_that_no_file_can_have_are_only_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in ((lambda: "x = 1\n",), (6, 0.0, ["x = 1\n"], "a.py")):
        monkeypatch.setitem(linecache.cache, "\udce9\ud83d", entry)
        assert name_place("\udce9\ud83d", 1) == "\udce9\ud83d:1"


class Thing:
    """Something that a weak reference can watch."""


def test_looking_at_frames_keeps_no_variable_alive() -> None:
    """Else every look at a rank's progress would keep its tensors until the collector came by."""
    began, go_on = threading.Event(), threading.Event()
    watched: list[weakref.ref[Thing]] = []

    def hold() -> None:
        thing = Thing()
        watched.append(weakref.ref(thing))
        began.set()
        go_on.wait(20)

    def look() -> set[int]:
        found = frames()
        return set(found)

    holder = threading.Thread(target=hold)
    gc.collect()
    gc.disable()
    try:
        holder.start()
        assert began.wait(20)
        assert holder.ident in look()
        go_on.set()
        holder.join()
        assert watched[0]() is None
    finally:
        gc.enable()


def test_a_thread_finds_its_own_frame_and_that_of_another() -> None:
    frame = frame_of(threading.get_ident())
    assert frame is sys._getframe()
    del frame
    assert frame_of(None) is None
    assert threading.get_ident() not in frames()


def _function(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[[], str], str]:
    """One of a file that is not there, which returns what is known of its text; and that text."""
    text = f"def read():\n    import linecache\n    return ''.join(linecache.getlines({name!r}))\n"
    monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
    names: dict[str, Callable[[], str]] = {"__name__": "__main__"}  # type: ignore[dict-item]
    exec(compile(text, name, "exec"), names)
    return names["read"], text


def test_the_first_call_of_a_function_finds_its_text(mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):  # a call goes past the agent, by which a text would come, and may be the quicker
        read, text = _function(f"<cell of nobody {number}>", monkeypatch)
        assert mesh4.execute(read).get(60).values() == [text] * 4


def test_others_know_it_too_and_an_argument_that_cannot_be_sent_is_named(
    mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, text = _function("<cell of one>", monkeypatch)
    with pytest.raises(Exception, match="argument 1"):
        mesh4.slice(gpus=0).execute(read, (each for each in "ab")).get(60)  # type: ignore[call-arg]
    assert mesh4.execute(read).get(60).values() == [text] * 4
