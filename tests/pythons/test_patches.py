"""What we replace in the code of others is still what we take it for, under each version that is tried."""

from __future__ import annotations

import ast
import builtins
import getpass
import importlib
import inspect
import pdb
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.dlpack
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from meshbook.concurrency import patches
from meshbook.groups.factory import GroupFactory
from meshbook.worker.process import _keep_operators

ROOT = Path(__file__).parents[2]
MINE = ("meshbook", "meshbook_extension", "meshbook_kernel")
HOOKS = {"sys"}  # modules whose attributes are there to be set


def original(owner: Any, name: str) -> Any:
    """The attribute as it is without us, whatever other tests have done in this process."""
    return patches._originals.get((id(owner), name), (owner, getattr(owner, name)))[1]


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def check_thread_start() -> None:
    assert parameters(original(threading.Thread, "start")) == ["self"]
    assert "start" not in vars(threading.Timer)  # so it is everybody's


def check_sleep() -> None:
    original(time, "sleep")(0)
    with pytest.raises(ValueError, match="non-negative"):
        original(time, "sleep")(-1)


def check_allocate_lock() -> None:
    assert "_allocate_lock()" in inspect.getsource(threading.Condition.wait)
    lock = original(threading, "_allocate_lock")()
    assert {"acquire", "release", "locked", "_at_fork_reinit"} <= set(dir(lock))


def check_run_backward() -> None:
    autograd = importlib.import_module("torch.autograd")
    assert callable(original(autograd, "_engine_run_backward"))
    for function in (autograd.backward, autograd.grad):
        assert "_engine_run_backward(" in inspect.getsource(function)
    assert callable(autograd.Variable._execution_engine.queue_callback)


def check_data() -> None:
    theirs = original(torch.Tensor, "data")
    assert theirs is vars(torch._C.TensorBase)["data"] and "data" not in vars(torch.nn.Parameter)
    tensor = torch.zeros(2)
    theirs.__set__(tensor, torch.ones(3))
    assert theirs.__get__(tensor).tolist() == [1.0] * 3


def check_group_helper() -> None:
    theirs = parameters(original(c10d, "_new_process_group_helper"))
    assert theirs[:6] == ["group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"]
    ours = {*parameters(GroupFactory._helper), "pg_options"}
    assert set(theirs) <= ours | {"backend_options", "enable_reconfigure"}, (
        "what more is true makes a group of torch's own"
    )
    assert parameters(c10d._hash_ranks_to_str) == ["ranks"], "the name of a group that its members make by themselves"
    for function in (original(dist, "init_process_group"), c10d._new_group_with_tag):
        assert "_new_process_group_helper(" in inspect.getsource(function)


def check_init_process_group() -> None:
    known = {
        "backend",
        "init_method",
        "timeout",
        "world_size",
        "rank",
        "store",
        "group_name",
        "pg_options",
        "device_id",
    }
    init = original(c10d, "init_process_group")
    assert known <= set(parameters(init))
    assert init is original(dist, "init_process_group") is original(device_mesh, "init_process_group")


def check_pdb() -> None:
    assert parameters(original(pdb.Pdb, "set_trace"))[:2] == ["self", "frame"]
    interaction = parameters(original(pdb.Pdb, "interaction"))
    assert interaction[:2] == ["self", "frame"] and len(interaction) == 3


def check_tqdm() -> None:
    notebook = pytest.importorskip("tqdm.notebook")
    bar = original(notebook, "tqdm")
    assert bar is original(notebook, "tqdm_notebook") and "display" in inspect.getsource(bar.__init__)
    assert "tqdm_notebook(range(" in inspect.getsource(notebook.trange)


def check_questions() -> None:
    assert parameters(original(builtins, "input")) == ["prompt"]
    assert parameters(original(getpass, "getpass"))[:2] == ["prompt", "stream"]


CHECKS: dict[str, Callable[[], None]] = {
    "threading.Thread.start": check_thread_start,
    "time.sleep": check_sleep,
    "threading._allocate_lock": check_allocate_lock,
    "torch.autograd._engine_run_backward": check_run_backward,
    "torch.Tensor.data": check_data,
    "distributed_c10d._new_process_group_helper": check_group_helper,
    "torch.distributed.init_process_group": check_init_process_group,
    "pdb.Pdb.set_trace, interaction": check_pdb,
    "builtins.input, getpass.getpass": check_questions,
    "tqdm.notebook.tqdm, tqdm_notebook": check_tqdm,
}
"""By the first column of the table in docs/design.md."""


@pytest.mark.parametrize("name", CHECKS)
def test_what_is_replaced_is_what_we_take_it_for(name: str) -> None:
    CHECKS[name]()


def test_torch_calls_what_tells_of_its_groups_and_modules() -> None:
    assert ".shutdown()" in inspect.getsource(c10d.destroy_process_group)  # of each group
    made = inspect.getsource(DistributedDataParallel.__init__)
    assert "self.module = module" in made and "_ddp_init_helper(" in made.partition("self.module = module")[2]
    used = ("_build_params_for_reducer", "_ddp_init_helper", "_build_debug_param_to_name_mapping")
    assert [name for name in used if not hasattr(DistributedDataParallel, name)] == []


def test_stack_data_looks_for_the_colours_of_a_frame_where_we_leave_them() -> None:
    core = pytest.importorskip("stack_data.core", reason="IPython 7 draws without it")
    assert "_pygmented_scope_lines" in vars(core.FrameInfo)
    assert type(vars(inspect)["modulesbyfile"]) is dict


def test_pydevd_takes_a_tracer_that_is_connected() -> None:
    code = (
        "import inspect; from meshbook.debug.dap_session import load_pydevd; pydevd = load_pydevd()\n"
        "assert list(inspect.signature(pydevd.PyDB.initialize_network).parameters)[:2] == ['self', 'sock']\n"
        "source = inspect.getsource(pydevd)\n"
        "assert 'if py_db is None:\\n        py_db = PyDB()' in source and '__setup_holder__' in source\n"
        "assert pydevd.PyDevdAPI.set_dont_trace_start_end_patterns and pydevd.PyDB.set_tracing_for_untraced_contexts\n"
    )
    pytest.importorskip("debugpy")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_kernels_have_what_the_notebook_replaces() -> None:
    from ipykernel import version_info
    from ipykernel.ipkernel import IPythonKernel
    from IPython.core.completer import IPCompleter

    kernel: Any = IPythonKernel
    assert parameters(kernel.do_complete) == ["self", "code", "cursor_pos"]
    assert parameters(kernel.do_inspect)[:4] == ["self", "code", "cursor_pos", "detail_level"]
    assert parameters(IPCompleter.completions) == ["self", "text", "offset"]
    assert parameters(kernel._cancel_on_sigint) == ["self", "future"]
    assert {"shell_stream", "_publish_debug_event"} <= set(dir(kernel))
    base = inspect.getsource(importlib.import_module("ipykernel.kernelbase"))
    if version_info[0] >= 7:
        assert parameters(kernel.shell_channel_thread_main) == ["self", "msg"] and "self.shell_channel_thread" in base
    else:
        assert "self.msg_queue" in base and {"schedule_dispatch", "dispatch_shell"} <= set(dir(kernel))
    assert "self.debugger = " in inspect.getsource(kernel.__init__)
    assert hasattr(importlib.import_module("ipykernel.debugger").Debugger, "process_request")


# ---- the table ---------------------------------------------------------------------------------------------------


def rows() -> dict[str, str]:
    """What the table lists, with the modules that replace it."""
    text = (ROOT / "docs" / "design.md").read_text().partition("## Code of others that is replaced")[2]
    found = re.findall(r"^\| `([^|]+)` \|[^|]*\|([^|]*)\|", text.partition("\n## ")[0], re.MULTILINE)
    return {name.replace("`", ""): places for name, places in found}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("runtime", "extension", "kernel"):
        for path in (ROOT / folder).rglob("*.py"):
            yield path, ast.parse(path.read_text())


@pytest.mark.slow
def test_every_patch_is_in_the_table_and_has_a_check() -> None:
    table = rows()
    assert [name for name in CHECKS if name not in table] == []
    for path, tree in sources():
        for call in ast.walk(tree):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "patch"):
                continue
            listed = [name for name, places in table.items() if f"{path.parent.name}/{path.name}" in places]
            name = call.args[1]
            wanted = str(name.value) if isinstance(name, ast.Constant) else ""
            assert any(wanted in each for each in listed), f"{path.name} replaces {ast.unparse(call)}"


@pytest.mark.slow
def test_nothing_else_sets_attributes_of_foreign_modules_and_classes() -> None:
    """Every replacement goes through `patch`, hooks aside."""
    strays = []
    for path, tree in sources():
        foreign = {name for node in ast.walk(tree) for name in _imported(node)} - HOOKS
        for node in ast.walk(tree):
            owners = [owner for target in _targets(node) if (owner := _owner(target)) is not None]
            strays += [f"{path.name}: {ast.unparse(node)}" for owner in owners if owner in foreign]
    assert strays == []


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in MINE:
        yield from (alias.asname or alias.name for alias in node.names)


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    for target in targets:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
        yield ast.Attribute(node.args[0], "")


def _owner(target: ast.expr) -> str | None:
    """What has the attribute that is set: ``a`` in ``a.b.c``, ``vars(a)["b"]``; None where it is no attribute."""
    match target:
        case ast.Subscript(value=ast.Call(func=ast.Name(id="vars"), args=[owner])) | ast.Attribute(value=owner):
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            return owner.id if isinstance(owner, ast.Name) else None
    return None


class _Kept:
    """Something with a finalizer of its own."""


def test_the_operators_of_pytorch_are_found_among_the_finalizers() -> None:
    """Ranks end 30 ms sooner without them; nothing else is kept from its end."""
    kept = _Kept()
    own = weakref.finalize(kept, print)
    registry = vars(weakref.finalize)["_registry"]

    def operators() -> list[Any]:
        return [each for each in registry if each.atexit and each.peek()[1].__module__ == "torch.library"]

    found = operators()
    try:
        assert found
        _keep_operators()
        assert own.atexit
        assert not operators()
    finally:
        own.detach()
        for each in found:
            each.atexit = True
