"""``%mesh spawn --on ssh:...`` in a notebook: what it shows, and what it says when it cannot."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest
from engine_clusters import SshHosts, ssh_hosts

from meshbook import shutdown

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def there(empty_notebook) -> Iterator[SshHosts]:
    with ssh_hosts() as hosts:
        yield hosts
        empty_notebook.run("%mesh stop --all")
        shutdown()


@pytest.fixture(scope="module")
def cluster(empty_notebook, there: SshHosts):
    """Two hosts with a rank each, in a folder and an environment of their own."""
    options = f"--device cpu --name far --cwd {there.folder} --env A=1,B=x=y -- -F {there.config}"
    empty_notebook.spawned = empty_notebook.run(f"%mesh spawn gpus=1 --on ssh:nodeA,nodeB --out far {options}")
    return empty_notebook


def test_the_names_give_the_axis_of_hosts(cluster) -> None:
    assert cluster.spawned.stdout.startswith('mesh "far": hosts=2, gpus=1, cpu, gloo; ready in ')
    assert "(2 ranks on 2 hosts)" in cluster.spawned.stdout
    assert "\n  hosts reach each other at nodeA " in cluster.spawned.stdout


def test_cells_run_there_in_their_folder_and_environment(cluster, there: SshHosts) -> None:
    ran = cluster.run("%%mesh\nimport os\nprint('it is', rank)\n(os.getcwd(), os.environ['A'], os.environ['B'])")
    assert "[0] it is 0" in ran.stdout and "[1] it is 1" in ran.stdout
    assert cluster["_mesh"].values() == [(str(there.folder), "1", "x=y")] * 2


def test_modules_beside_the_notebook_are_found_by_the_ranks(cluster, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "far_helpers.py").write_text("from far_package import width\n\ndef area():\n    return width() ** 2\n")
    (tmp_path / "far_package" / "parts").mkdir(parents=True)
    (tmp_path / "far_package" / "__init__.py").write_text("from .parts.sizes import width\n")
    (tmp_path / "far_package" / "parts" / "sizes.py").write_text("def width():\n    return 3\n")
    (tmp_path / "far_broken.py").write_text("def (\n")
    assert cluster.run("%%mesh\nimport far_helpers; far_helpers.area()").plain.strip() == "[0,1] 9"
    cluster.run("from far_package.parts import sizes\nvalues = far.execute(sizes.width).get()")
    assert list(cluster["values"].values()) == [3, 3]
    assert "No module named 'far_nowhere'" in cluster.fail("%%mesh\nimport far_nowhere")
    assert "far_broken, which lies beside the notebook, does not parse: " in cluster.fail("%%mesh\nimport far_broken")
    (tmp_path / "far_package" / "parts" / "sizes.py").write_text("def width():\n    return 4\n")
    told = cluster.run(f"%mesh sync {tmp_path / 'far_package'}").stdout
    assert told.count("reloaded on ranks 0,1") == 2 and "far_package.parts.sizes" in told
    cluster.run(f"%mesh sync {tmp_path / 'far_helpers.py'}")
    assert cluster.run("%%mesh\nimport far_package; far_package.width()").plain.strip() == "[0,1] 4"


def test_a_host_that_is_lost_is_named_and_heals_on_its_own_machine(cluster) -> None:
    cluster.run("%mesh use far --out far")
    client = psutil.Process(cluster["far"]._mesh.hosts[1].launched.pid)
    cluster.run("%%mesh --async hosts=1\nimport time; time.sleep(120)")
    client.kill()
    said = cluster.fail("%mesh wait")
    assert "rank 1 on nodeB ended" in said and "ssh connection has ended" in said
    assert "host nodeB started again, rank 1 started again" in cluster.run("%mesh heal").stdout
    assert cluster.run("%%mesh\nimport os; os.environ['B']").plain.count("x=y") == 1


def test_more_hosts_come_from_where_they_are_named_and_others_take_lost_places(cluster, there: SshHosts) -> None:
    said = cluster.fail("%mesh grow hosts=1")
    assert "cannot have more hosts like its first: its hosts were named" in said
    assert "Say who starts them: %mesh grow hosts=1 --on ENGINE" in said
    options = f"-- -F {there.config}"
    assert "2 hosts were named, but 1 are asked for" in cluster.fail(f"%mesh grow hosts=1 --on ssh:a,b {options}")
    assert "needs no more hosts" in cluster.fail(f"%mesh grow gpus=1 --on ssh:nodeC {options}")
    assert "--python is for hosts of another engine" in cluster.fail("%mesh grow hosts=1 --python python3")
    assert "no host of mesh" in cluster.fail(f"%mesh heal --on ssh:nodeC {options}")
    cluster.run("%%mesh\nkept = rank")
    grown = cluster.run(f"%mesh grow hosts=1 --on ssh:nodeC {options}").stdout
    assert 'mesh "far": hosts=3, gpus=1; rank 2 is new' in grown
    cluster.run("%%mesh\nt = torch.ones(1); dist.all_reduce(t); t.item(), globals().get('kept')")
    assert cluster["_mesh"].values() == [(3.0, 0), (3.0, 1), (3.0, None)]
    cluster.run("%mesh use far --out far")
    psutil.Process(cluster["far"]._mesh.hosts[2].launched.pid).kill()
    cluster.fail("%%mesh hosts=2\nimport time; time.sleep(120)")
    assert "host nodeD started again, rank 2 started" in cluster.run(f"%mesh heal --on ssh:nodeD {options}").stdout
    cluster.run("%%mesh\nt = torch.ones(1); dist.all_reduce(t); t.item(), globals().get('kept')")
    assert cluster["_mesh"].values() == [(3.0, 0), (3.0, 1), (3.0, None)]
    cluster.run("%mesh shrink hosts=1")
    cluster.run("%mesh use far --out far")
    assert cluster["far"].hosts == ("nodeA", "nodeB")


def test_folder_and_environment_of_local_ranks(empty_notebook, tmp_path) -> None:
    empty_notebook.run(f"%mesh spawn gpus=1 --no-torch --name near --cwd {tmp_path} --env A=1")
    code = "%%mesh\nimport os\n(os.getcwd(), os.environ['A'], 'HOME' in os.environ)"
    empty_notebook.run(code)
    assert empty_notebook["_mesh"].values() == [(str(tmp_path), "1", "HOME" in os.environ)]
    empty_notebook.run("%mesh respawn rank=0")
    empty_notebook.run(code)
    assert empty_notebook["_mesh"].values() == [(str(tmp_path), "1", "HOME" in os.environ)]
    empty_notebook.run("%mesh stop near")
