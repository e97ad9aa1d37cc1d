"""Settings of the process, by Monarch's names."""

from __future__ import annotations

import time

import pytest

from meshbook import ProcMesh, this_host
from meshbook.actor import Actor, SupervisionError, endpoint
from meshbook.errors import SpawnError, UsageError
from meshbook.monarch.config import (
    clear_runtime_config,
    configure,
    configured,
    get_global_config,
    get_runtime_config,
)

pytestmark = pytest.mark.monarch


def test_settings_hold_in_the_block() -> None:
    configure(mesh_proc_spawn_max_idle="1m 30s")
    with configured(host_spawn_ready_timeout="500ms") as settings:
        assert settings == get_global_config()
        named = ("enable_log_forwarding", "host_spawn_ready_timeout", "mesh_proc_spawn_max_idle")
        assert [settings[name] for name in named] == [True, "500ms", "1m 30s"]
    assert get_runtime_config() == {"mesh_proc_spawn_max_idle": "1m 30s"}
    clear_runtime_config()
    assert get_runtime_config() == {}
    assert get_global_config()["mesh_proc_spawn_max_idle"] == "2m"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"mesh_proc_spawn_max_idl": "1s"}, 'Did you mean "mesh_proc_spawn_max_idle"'),
        ({"mesh_proc_spawn_max_idle": "soon"}, "Invalid duration format 'soon'"),
        ({"mesh_proc_spawn_max_idle": "30"}, "Invalid duration format '30' .* with units"),
        ({"mesh_proc_spawn_max_idle": "3 fortnights"}, "Invalid duration format"),
        ({"mesh_proc_spawn_max_idle": 3}, "is a duration, a text"),
        ({"mesh_proc_spawn_max_idle": "0s"}, "a duration above 0"),
        ({"enable_log_forwarding": "no"}, "is True or False"),
        ({"codec_max_frame_length": 1.5}, "is a count of bytes, not 1.5"),
        ({"codec_max_frame_length": True}, "is a count of bytes, not True"),
        ({"codec_max_frame_length": -1}, "a count of bytes from 0, not -1"),
        ({"cleanup_timeout": "3s"}, "no setting cleanup_timeout.* There are codec_max_frame_length, enable_log"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_set(settings: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        configure(host_spawn_ready_timeout="2s", **settings)
    assert get_runtime_config() == {}


def test_processes_have_so_long_to_come_up() -> None:
    with (
        configured(mesh_proc_spawn_max_idle="1s"),
        pytest.raises(SpawnError, match=r"no progress for 1 s while .*: rank 0 has not answered"),
    ):
        this_host().spawn_procs({"gpus": 1}, _sleep, torch=False)


def _sleep() -> None:
    time.sleep(60)


def test_meshes_are_silent_until_they_are_told_otherwise(capfd: pytest.CaptureFixture[str]) -> None:
    with configured(enable_log_forwarding=False):
        procs = this_host().spawn_procs({"gpus": 1}, torch=False)
    procs.run("print('not shown')").get(60)
    procs.logging_option(stream_to_client=True).get(60)
    procs.run("print('shown')").get(60)
    procs.stop()
    assert capfd.readouterr().out == "[0] shown\n"


class Asker(Actor):
    @endpoint
    def ask(self, own: str) -> tuple[object, object]:
        with configured(**({"mesh_proc_spawn_max_idle": own} if own else {})) as settings:
            return settings["host_spawn_ready_timeout"], settings["mesh_proc_spawn_max_idle"]


def test_ranks_are_told_what_the_program_has_set(mesh4: ProcMesh) -> None:
    asker = mesh4.slice(gpus=0).spawn("asker", Asker)
    assert asker.ask.call_one("").get(60) == ("1m", "2m")
    with configured(host_spawn_ready_timeout="7s", mesh_proc_spawn_max_idle="8s"):
        assert asker.ask.call_one("").get(60) == ("7s", "8s")
        assert asker.ask.call_one("9s").get(60) == ("7s", "9s"), "its own comes first"
    assert asker.ask.call_one("").get(60) == ("1m", "2m")


class Sizes(Actor):
    @endpoint
    def of(self, parts: list[bytes]) -> int:
        return sum(map(len, parts))


def test_calls_may_be_limited_in_size(mesh4: ProcMesh) -> None:
    sizes = mesh4.spawn("sizes", Sizes)
    parts = [bytes(1 << 18)] * 4
    with configured(codec_max_frame_length=1 << 20):
        with pytest.raises(SupervisionError, match=r"arguments of sizes\.of have 1\.05 MB, .* codec_max_frame_length"):
            sizes.of.call([bytes(part) + b"x" for part in parts])
        assert sizes.of.call(parts[:3]).get(60).values() == [3 << 18] * 4, "the actors live on"
    assert sizes.of.call([*parts, b"x"]).get(60).values() == [(1 << 20) + 1] * 4
