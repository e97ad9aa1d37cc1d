"""Settings of the process, by Monarch's names."""

from __future__ import annotations

import time

import pytest

from meshbook import this_host
from meshbook.config import clear_runtime_config, configure, configured, get_global_config, get_runtime_config
from meshbook.errors import SpawnError, UsageError


def test_settings_hold_in_the_block() -> None:
    configure(mesh_proc_spawn_max_idle="1m 30s")
    with configured(host_spawn_ready_timeout="500ms") as settings:
        assert settings == get_global_config()
        assert settings == {
            "enable_log_forwarding": True,
            "host_spawn_ready_timeout": "500ms",
            "mesh_proc_spawn_max_idle": "1m 30s",
        }
    assert get_runtime_config() == {"mesh_proc_spawn_max_idle": "1m 30s"}
    clear_runtime_config()
    assert get_runtime_config() == {}
    assert get_global_config()["mesh_proc_spawn_max_idle"] == "2m"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"mesh_proc_spawn_max_idl": "1s"}, 'Did you mean "mesh_proc_spawn_max_idle"'),
        ({"mesh_proc_spawn_max_idle": "soon"}, 'a duration above 0, as in "30s"'),
        ({"mesh_proc_spawn_max_idle": "3 weeks"}, "a duration above 0"),
        ({"mesh_proc_spawn_max_idle": 3}, "a duration above 0"),
        ({"enable_log_forwarding": "no"}, "is True or False"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_set(settings: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        configure(host_spawn_ready_timeout="2s", **settings)
    assert get_runtime_config() == {}


def test_settings_without_meaning_are_kept_and_told_of() -> None:
    told = "rdma_max_chunk_size_mb, tail_log_lines: set, as in Monarch, but of no meaning"
    with pytest.warns(UserWarning, match=told), configured(tail_log_lines=3, rdma_max_chunk_size_mb=1) as settings:
        assert settings["tail_log_lines"] == 3


def test_processes_have_so_long_to_come_up() -> None:
    with configured(mesh_proc_spawn_max_idle="1s"), pytest.raises(SpawnError, match="answered within 1 s"):
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
