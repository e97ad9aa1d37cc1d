"""Code of every room counts as the runtime's own, wherever a module has moved to."""

from __future__ import annotations

import importlib.util
import pkgutil
from pathlib import Path

import pytest

import meshbook
from meshbook.source.location import RUNTIME, drop_own_frames, is_runtimes_code, is_users_code, kind_of_file
from meshbook.stacks import dump
from meshbook.worker.worker import Worker

FOLDER = Path(str(meshbook.__file__)).parent
FILES = {".".join(path.relative_to(FOLDER).with_suffix("").parts): str(path) for path in FOLDER.rglob("*.py")}
ROOMS = sorted(room.name for room in pkgutil.iter_modules(meshbook.__path__))


@pytest.mark.parametrize("room", ROOMS)
def test_frames_of_a_room_are_the_runtimes_and_are_dropped_from_tracebacks(room: str) -> None:
    own = [path for name, path in FILES.items() if name.partition(".")[0] == room]
    assert own and importlib.util.find_spec(f"meshbook.{room}") is not None
    for path in own:
        code = compile("def run(action):\n    action()\n", path, "exec")
        assert is_runtimes_code(code) and not is_users_code(code) and kind_of_file(path) == RUNTIME
        names: dict[str, object] = {}
        exec(code, names)
        run = names["run"]
        assert callable(run)
        with pytest.raises(ZeroDivisionError) as raised:
            run(lambda: 1 / 0)
        drop_own_frames(raised.value)
        traceback, left = raised.value.__traceback__, []
        while traceback is not None:
            left.append(traceback.tb_frame.f_code.co_filename)
            traceback = traceback.tb_next
        assert __file__ in left and path not in left


def test_the_main_thread_of_a_dump_is_known_by_a_method_that_there_is() -> None:
    assert callable(getattr(Worker, dump._MAIN))
