"""Programs for torchrun on the processes of a mesh."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshbook import ProcMesh, this_host
from meshbook.actor import ActorError
from meshbook.errors import UsageError
from meshbook.monarch.spmd import SPMDActor, setup_torch_elastic_env, setup_torch_elastic_env_async

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from beside import NAME

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(3, 2) * (dist.get_rank() + 1)).sum().backward()
    total = torch.tensor([float(os.environ["RANK"])])
    dist.all_reduce(total)
    grad = model.module.weight.grad[0, 0].item()
    with open(f"{sys.argv[1]}-{dist.get_rank()}", "w") as file:
        file.write(f"{NAME} {sys.argv[2:]} {total.item()} {dist.get_world_size()} {grad}")
    dist.destroy_process_group()
    sys.exit(int(os.environ.get("END_WITH", 0)))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("NAME = 'found'\n")
    (tmp_path / "train_ddp.py").write_text(SCRIPT)
    return tmp_path / "train_ddp.py"


@pytest.mark.parametrize("group", [False, True])
def test_a_script_trains_on_every_process(group: bool, script: Path, tmp_path: Path) -> None:
    with this_host().spawn_procs({"gpus": 2}, name="spmd", group=group, device="cpu") as procs:
        trainers = procs.spawn("trainers", SPMDActor)
        out = tmp_path / "out"
        for _ in range(2):
            address, port = trainers.slice(gpus=0).get_host_port.call_one(None).get(20)
            arguments = [str(script), str(out), "--lr", "0.1"]
            assert trainers.main.call(address, port, arguments).get(60).values() == [True, True]
            for rank in range(2):
                told = (tmp_path / f"out-{rank}").read_text()
                assert told == "found ['--lr', '0.1'] 1.0 2 4.5"
        assert "found" not in str(procs.evaluate("__import__('sys').argv").get(20).values())


def test_an_exit_code_and_what_is_raised_are_told(mesh2: ProcMesh, script: Path, tmp_path: Path) -> None:
    trainers = mesh2.spawn("trainers", SPMDActor)
    mesh2.run("import os; os.environ['END_WITH'] = '3'").get(20)
    with pytest.raises(ActorError, match=r"ScriptExit: .*train_ddp.py ended with exit code 3"):
        trainers.main.call("localhost", 1, [str(script), str(tmp_path / "out")]).get(60)
    (tmp_path / "broken.py").write_text("raise ValueError('no data')")
    with pytest.raises(ActorError, match="ValueError: no data"):
        trainers.main.call("localhost", 1, [str(tmp_path / "broken.py")]).get(60)
    with pytest.raises(ActorError, match="UsageError: name the script to run"):
        trainers.main.call("localhost", 1, ["-m"]).get(60)
    assert trainers.main.call("localhost", 1, ["-m", "this"]).get(60).values() == [True, True]


def test_the_variables_of_torchrun_are_set(mesh4: ProcMesh) -> None:
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    setup_torch_elastic_env(mesh4, "somewhere", 1234)
    read = f"[__import__('os').environ[name] for name in {names}]"
    told = mesh4.evaluate(read).get(20).values()
    assert told == [["somewhere", "1234", str(rank), "4", str(rank), "4", "0"] for rank in range(4)]
    asyncio.run(setup_torch_elastic_env_async(mesh4, use_ipaddr="IPv4"))
    addresses = {tuple(each[:2]) for each in mesh4.evaluate(read).get(20).values()}
    ((address, port),) = addresses
    assert address.count(".") == 3 and 0 < int(port) < 1 << 16
    with pytest.raises(UsageError, match="both, or neither"):
        setup_torch_elastic_env(mesh4, "somewhere")
    with pytest.raises(ActorError, match='use_ipaddr is None, "IPv4" or "IPv6", not 7'):
        setup_torch_elastic_env(mesh4, use_ipaddr=7)


@pytest.mark.slow
def test_several_hosts_of_this_machine_stand_for_several() -> None:
    with this_host().spawn_procs({"hosts": 2, "gpus": 2, "threads": 2}, torch=False) as procs:
        setup_torch_elastic_env(procs, "somewhere", 1234)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        read = f"[int(__import__('os').environ[name]) for name in {names}]"
        assert procs.evaluate(read).get(20).values() == [[rank, 8, rank % 4, 4, rank // 4, 2] for rank in range(8)]
