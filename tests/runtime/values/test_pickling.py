"""Values as bytes: what goes out of band, what goes by value, and what the errors name."""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import tracemalloc
import types
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch

from meshbook.errors import LoadError, SerializationError
from meshbook.values.pickling import HEAD_MAX_BYTES, Pickled, PreparedArguments, dumps, dumps_bounded, loads
from meshbook.values.tensors import MIN_BYTES

LARGE = MIN_BYTES


class Config:
    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)


class Slotted:
    __slots__ = ("handle", "name")

    def __init__(self, handle: object) -> None:
        self.handle, self.name = handle, "slotted"


class Selective:
    """Leaves its lock at home, as many classes do."""

    def __init__(self, payload: object) -> None:
        self.lock = threading.Lock()
        self.payload = payload

    def __getstate__(self) -> dict[str, object]:
        return {"payload": self.payload}


class Pair(NamedTuple):
    left: object
    right: object


class OddTensor(torch.Tensor):
    pass


def over(value: Any) -> Any:
    """The value as another process would get it: from copies of the buffers."""
    pickled = dumps(value, what="value")
    head, buffers = pickled.head, pickled.buffers
    return loads(head, [bytearray(buffer) for buffer in buffers])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        (one.dtype, one.shape, one.stride(), one.requires_grad)
        == (other.dtype, other.shape, other.stride(), other.requires_grad)
    ) and torch.equal(one, other)


# ---- plain values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        1 << 90,
        2.5,
        1j,
        "text",
        b"bytes",
        (1, 2.0, "a"),
        [1, [2]],
        {"a": {1, 2}},
        Pair(1, (2,)),
    ],
    ids=repr,
)
def test_plain_values_come_back_with_no_buffers(value: object) -> None:
    pickled = dumps(value, what="value")
    assert not pickled.buffers
    assert loads(pickled.head, pickled.buffers) == value


@pytest.mark.parametrize(
    "call", [(abs, -1), (int, "3"), (json.dumps, {"a": [1]}), ([1, 2, 2].count, 2), (np.arange(20_000.0).sum,)]
)
def test_a_call_of_what_has_a_name_comes_back(call: tuple[Any, ...]) -> None:
    function, *args = call
    pickled = dumps(call, what="call")
    assert bool(pickled.buffers) == (getattr(getattr(function, "__self__", None), "nbytes", 0) > 0)
    function_there, *args_there = loads(pickled.head, pickled.buffers)
    assert function_there(*args_there) == function(*args)


def test_small_buffers_stay_in_the_head_and_large_ones_leave_it() -> None:
    small, large = np.zeros(LARGE - 1, np.uint8), np.zeros(LARGE, np.uint8)
    assert not dumps(small, what="x").buffers
    pickled = dumps([small, large], what="x")
    assert [buffer.nbytes for buffer in pickled.buffers] == [LARGE]
    assert len(pickled.head) < LARGE + 500


def test_large_arrays_are_not_copied_and_arrive_writable() -> None:
    array = np.arange(LARGE, dtype=np.float64).reshape(2, -1)
    (buffer,) = dumps(array, what="x").buffers
    array[0, 0] = -1
    assert np.frombuffer(buffer)[0] == -1
    loaded = over(array)
    loaded += 1
    assert np.array_equal(loaded, array + 1)


@pytest.mark.parametrize("make", [lambda a: a[:, ::2], lambda a: a.T, lambda a: a.T[::3]], ids=["gaps", "f", "both"])
def test_large_arrays_in_any_layout_go_out_of_band(make: Any) -> None:
    array = make(np.arange(4 * LARGE, dtype=np.int16).reshape(-1, 16))
    pickled = dumps(array, what="x")
    assert len(pickled.head) < 500
    assert np.array_equal(over(array), array)


# ---- tensors -----------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
DTYPES += [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn]


@pytest.mark.parametrize("size", [3, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_arrive_whole(dtype: torch.dtype, size: int) -> None:
    tensor = torch.arange(size).remainder(7).to(dtype)
    pickled = dumps(tensor, what="x")
    assert len(pickled.buffers) == (size == LARGE)
    loaded = over(tensor)
    assert loaded.dtype is dtype
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(2, 0, 3, dtype=torch.int8),
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(24).reshape(2, 3, 4)[:, 1:, :3],
        torch.arange(4 * LARGE).reshape(4, -1).t(),
        torch.ones(2, requires_grad=True),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(1).expand(1000),
    ],
    ids=[
        "0-d",
        "empty",
        "empty 3-d",
        "transposed",
        "sliced",
        "large transposed",
        "leaf",
        "channels last",
        "expanded",
    ],
)
def test_tensors_keep_their_layout(tensor: torch.Tensor) -> None:
    loaded = over(tensor)
    assert same(loaded, tensor)
    assert loaded.is_leaf


def test_an_expanded_tensor_sends_one_element() -> None:
    assert len(dumps(torch.ones(1).expand(1000, 1000), what="x").head) < 300


def test_a_view_sends_only_what_it_spans() -> None:
    base = torch.zeros(64, LARGE, dtype=torch.uint8)
    assert [buffer.nbytes for buffer in dumps(base[3], what="x").buffers] == [LARGE]
    column = dumps(base[:, 0], what="x")
    assert not column.buffers
    assert len(column.head) < 500


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
    ],
    ids=["conjugate", "negative"],
)
def test_lazy_conjugates_arrive_resolved(tensor: torch.Tensor) -> None:
    loaded = over(tensor)
    assert torch.equal(loaded, tensor)
    assert not loaded.is_conj() and not loaded.is_neg()


def test_a_result_of_autograd_arrives_as_a_leaf() -> None:
    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    loaded = over(loss)
    assert loaded.is_leaf and loaded.requires_grad and loaded.item() == 6


@pytest.mark.parametrize("size", [2, LARGE], ids=["small", "large"])
def test_parameters_stay_parameters_and_attributes_stay(size: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(size), requires_grad=False)
    parameter.tag = "frozen"
    tensor = torch.ones(size)
    tensor.tag = {"a": 1}  # type: ignore[attr-defined]
    loaded, plain = over((parameter, tensor))
    assert type(loaded) is torch.nn.Parameter
    assert not loaded.requires_grad and loaded.tag == "frozen"
    assert type(plain) is torch.Tensor and plain.tag == {"a": 1}


@pytest.mark.parametrize("size", [8, LARGE], ids=["small", "large"])
def test_tensors_of_one_message_keep_sharing_memory(size: int) -> None:
    base = torch.zeros(size)
    pickled = dumps([base, base[2:], base.view(2, -1), base], what="x")
    assert sum(buffer.nbytes for buffer in pickled.buffers) <= base.nbytes
    whole, tail, square, again = loads(pickled.head, [bytearray(buffer) for buffer in pickled.buffers])
    whole[2] = 5
    assert tail[0] == 5 and square.view(-1)[2] == 5 and again is whole


def test_a_view_that_does_not_fit_the_elements_of_what_was_sent_is_sent_again() -> None:
    base = torch.arange(32, dtype=torch.uint8)
    odd, wide = over([base[4:], base[8:24].view(torch.int64)])
    assert torch.equal(odd, base[4:])
    assert torch.equal(wide, base[8:24].view(torch.int64))


def test_tied_weights_stay_tied() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    loaded = over(model)
    assert loaded[0].weight is loaded[1].weight
    state = over(model.state_dict())
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()


def test_a_model_trains_after_its_journey() -> None:
    model = over(torch.nn.Linear(200, 200))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 200)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model.weight)


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.ones(3).as_subclass(OddTensor)],
    ids=["sparse", "meta", "subclass"],
)
def test_other_tensors_go_as_torch_pickles_them(tensor: torch.Tensor) -> None:
    loaded = over(tensor)
    assert type(loaded) is type(tensor)
    assert (loaded.layout, loaded.device, loaded.shape) == (tensor.layout, tensor.device, tensor.shape)
    assert loaded.is_meta or torch.equal(loaded.to_dense(), tensor.to_dense())


def test_small_tensors_can_be_resized_on_arrival() -> None:
    assert over(torch.ones(2)).resize_(100).shape == (100,)


def test_read_only_buffers_give_writable_tensors_without_a_warning() -> None:
    pickled = dumps(torch.zeros(LARGE), what="x")
    head, buffers = pickled.head, pickled.buffers
    loaded = loads(head, [bytes(buffer) for buffer in buffers])
    loaded += 1
    assert loaded.min() == 1


def test_a_tensor_lives_on_when_its_buffers_are_let_go() -> None:
    pickled = dumps(torch.full((LARGE,), 7, dtype=torch.uint8), what="x")
    head, buffers = pickled.head, pickled.buffers
    loaded = loads(head, [bytearray(buffers.pop())])
    np.zeros(LARGE)
    assert loaded.min() == 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_arrive_on_the_cpu() -> None:
    model = torch.nn.Linear(300, 300).cuda()
    loaded = over(model)
    assert {parameter.device.type for parameter in loaded.parameters()} == {"cpu"}
    assert type(loaded.weight) is torch.nn.Parameter
    assert torch.equal(loaded.weight, model.weight.cpu())


@pytest.fixture(scope="module")
def sharded() -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # gloo leaves its sockets open
    yield distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]), [Shard(0)])
    dist.destroy_process_group()


def test_a_dtensor_is_refused_with_what_to_send_instead(sharded: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].weight = torch.nn.Parameter(sharded)
    with pytest.raises(SerializationError) as caught:
        dumps({"model": model}, what="state")
    assert caught.value.path == "state['model'].0.weight"
    assert caught.value.type_name.endswith("DTensor")
    assert ".to_local()" in str(caught.value) and ".full_tensor()" in str(caught.value)
    assert dumps_bounded(sharded, 1 << 20) is None
    assert same(over(sharded.to_local()), sharded.to_local())


# ---- by value ----------------------------------------------------------------------------------------------


def run_script(tmp_path: Path, code: str, *args: str) -> str:
    """Run ``code`` as the ``__main__`` of a fresh process, without torch, and return what it prints."""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


RECEIVE = """
import sys
from meshbook.values.pickling import loads
class Model:
    def step(self): return "the receiver's own"
def work(): return "the receiver's own"
for path in sys.argv[1:]:
    for value in loads(open(path, "rb").read(), []):
        print(value() if callable(value) else value.step())
"""

SEND = """
import sys
from meshbook.values.pickling import dumps
def send(path, *values):
    open(path, "wb").write(dumps(values, what="values").head)
class Model:
    def step(self): return "first"
def work(): return "first"
old = Model()
send(sys.argv[1], Model(), work)
class Model:
    def step(self): return "second"
def work(): return "second"
send(sys.argv[2], Model(), work, old)
Model.step = lambda self: "patched"
send(sys.argv[3], Model())
"""


def test_classes_and_functions_of_main_arrive_in_their_newest_definition(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"message-{index}") for index in range(3)]
    run_script(tmp_path, SEND, *paths)
    assert run_script(tmp_path, RECEIVE, *paths).split() == ["first"] * 2 + ["second"] * 2 + [
        "first",
        "patched",
    ]


def test_lambdas_closures_and_local_classes_travel() -> None:
    offset = 3

    class Local:
        value = LARGE

    assert over(lambda x: x + offset)(4) == 7
    assert over(Local)().value == LARGE


def test_a_closure_over_a_large_tensor_leaves_it_out_of_band() -> None:
    weights = torch.ones(LARGE)
    pickled = dumps(lambda: weights.sum(), what="f")
    assert len(pickled.buffers) == 1
    assert len(pickled.head) < 2000
    assert loads(pickled.head, pickled.buffers)() == LARGE


def test_modules_registered_for_it_go_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("only_here")
    exec("def answer():\n    return 42\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    by_reference = dumps(module.answer, what="f").head
    cloudpickle.register_pickle_by_value(module)
    try:
        by_value = dumps(module.answer, what="f").head
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    monkeypatch.delitem(sys.modules, "only_here")
    assert loads(by_value)() == 42
    with pytest.raises(LoadError):
        loads(by_reference)


# ---- what cannot travel ------------------------------------------------------------------------------------

LOCK = threading.Lock()


def uses_lock() -> bool:
    return LOCK.locked()


uses_lock.__module__ = "__main__"  # as if the notebook had defined it


def cyclic() -> Config:
    parent = Config(name="parent")
    parent.children = [Config(parent=parent), Config(parent=parent)]  # type: ignore[attr-defined]
    parent.lock = LOCK  # type: ignore[attr-defined]
    return parent


def closing_over(value: object) -> Any:
    return lambda: value


class Holder:
    lock = LOCK

    def use(self) -> bool:
        return LOCK.locked()


Holder.__module__ = "__main__"

PATHS = [
    (LOCK, "x"),
    ([1, "a", LOCK], "x[2]"),
    ({"a": 1, "b": (0, {"c": LOCK})}, "x['b'][1]['c']"),
    ({LOCK: 1}, f"the key {repr(LOCK)[:37]}... of x"),
    ({LOCK}, "an item of x"),
    (Config(callbacks=[1, 2, Config(lock=LOCK)]), "x.callbacks[2].lock"),
    (Slotted([LOCK]), "x.handle[0]"),
    (Selective({"deep": LOCK}), "x.payload['deep']"),
    (Pair(1, LOCK), "x[1]"),
    (deque([0, LOCK]), "x[1]"),
    (OrderedDict(a=LOCK), "x['a']"),
    (ValueError("text", LOCK), "x.args[1]"),
    (functools.partial(print, LOCK), "x.args[0]"),
    (functools.partial(print, key=LOCK), "x.keywords['key']"),
    (Config(lock=LOCK).__getattribute__, "x.__self__.lock"),
    (cyclic(), "x.lock"),
    (closing_over([LOCK]), "x's closure variable value[0]"),
    (uses_lock, "x's global LOCK"),
    (Holder, "x.lock"),
    (Config(holder=Holder()), "type(x.holder).lock"),
    ((number for number in range(3)), "x"),
]


@pytest.mark.parametrize(("value", "path"), PATHS, ids=range(len(PATHS)))
def test_the_error_names_the_path_of_what_cannot_travel(value: object, path: str) -> None:
    with pytest.raises(SerializationError) as caught:
        dumps(value, what="x")
    assert (caught.value.path if "0x" not in path else path) == path
    assert caught.value.type_name in ("_thread.lock", "generator")
    assert pickle.loads(pickle.dumps(caught.value)).path == caught.value.path


def test_the_error_reads_as_a_sentence() -> None:
    with pytest.raises(SerializationError) as caught:
        dumps(Config(lock=LOCK), what="config")
    assert str(caught.value) == (
        "config.lock is a _thread.lock, which cannot be sent: it exists only inside this process. "
        "Send what it is made from, and create it on the ranks."
    )


def test_open_files_and_sockets_are_named_by_type(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, pytest.raises(SerializationError) as caught:
        dumps({"log": log}, what="x")
    assert (caught.value.path, caught.value.type_name) == ("x['log']", "_io.TextIOWrapper")


def test_the_path_starts_from_the_named_part_that_fails() -> None:
    fine, config = [1], Config(lock=LOCK)
    with pytest.raises(SerializationError) as caught:
        dumps((({"fine": fine, "config": config},), {}), what="a call", roots={"fine": fine, "config": config})
    assert caught.value.path == "config.lock"


def test_an_exception_of_the_users_own_code_is_the_reason() -> None:
    class Stubborn:
        def __reduce__(self) -> str:
            raise ValueError("not today")

    with pytest.raises(SerializationError, match=r"x\[1\] is a .*Stubborn, .*: ValueError: not today\."):
        dumps([1, Stubborn()], what="x")


def test_endless_nesting_is_said_so() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(SerializationError, match=r"x is a list, .* nested too deeply"):
        dumps(value, what="x")


def test_the_search_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshbook.values.pickling.SEARCH_MAX_S", 0.2)
    value = [[[str(number)] for number in range(100_000)], {"lock": LOCK}]
    started = time.monotonic()
    with pytest.raises(SerializationError) as caught:
        dumps(value, what="x")
    assert time.monotonic() - started < 30
    assert caught.value.path.startswith("x")


# ---- what cannot be built here -----------------------------------------------------------------------------


def test_a_module_missing_at_the_receiver_is_named_with_its_side() -> None:
    head = b"\x80\x05cmissing_module.inner\nThing\n."
    with pytest.raises(LoadError, match=r'arrived in rank 3 on host b needs the module "missing_module"') as caught:
        loads(head, where="rank 3 on host b")
    assert caught.value.module == "missing_module"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_module_that_lacks_something_is_named() -> None:
    with pytest.raises(LoadError, match=r'needs more than the module "json" has there .*Absent') as caught:
        loads(b"\x80\x05cjson\nAbsent\n.")
    assert caught.value.module == "json"


class Fussy(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("message")


def test_a_class_that_fails_to_load_is_reported() -> None:
    with pytest.raises(LoadError, match=r"cannot be built there: TypeError: .*Fussy"):
        loads(dumps(Fussy(1, 2), what="x").head)


# ---- bounded -----------------------------------------------------------------------------------------------


def test_bounded_pickles_what_fits() -> None:
    value = {"loss": 0.5, "weights": torch.ones(LARGE)}
    pickled = dumps_bounded(value, 5 * LARGE)
    assert isinstance(pickled, Pickled)
    assert torch.equal(loads(pickled.head, pickled.buffers)["weights"], value["weights"])
    assert dumps_bounded(value, 4 * LARGE) is None
    assert dumps_bounded(lambda: 1, LARGE) is not None


@pytest.mark.parametrize("value", [LOCK, [1, (x for x in "a")], "x" * 2000], ids=["lock", "generator", "text"])
def test_bounded_gives_none_for_what_cannot_travel(value: object) -> None:
    assert dumps_bounded(value, 1000) is None


def untouched(size_bytes: int) -> torch.Tensor:
    """A tensor whose pages the system has not given out yet."""
    return torch.from_numpy(np.zeros(size_bytes, np.uint8))


@pytest.mark.parametrize(
    "make",
    [
        lambda: untouched(2 << 30),
        lambda: untouched(2 << 30)[::3],
        lambda: untouched(2 << 30).as_subclass(OddTensor),
        lambda: {"a": untouched(2 << 30).untyped_storage()},
        lambda: untouched(2 << 30).numpy()[::3],
        lambda: [untouched(2 << 30).numpy()],
        lambda: closing_over(untouched(2 << 30)),
        lambda: [list(range(1000))] * 3 + [[number] for number in range(300_000)],
        lambda: b"x" * (64 << 20),
    ],
    ids=["tensor", "gaps", "subclass", "storage", "array gaps", "array", "closure", "many", "bytes"],
)
def test_bounded_gives_up_before_it_costs_anything(make: Any) -> None:
    value = make()
    before = _resident_bytes()
    tracemalloc.start()
    started = time.process_time()
    try:
        assert dumps_bounded(value, 1 << 20) is None
        taken_s, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken_s < 1
    assert peak < 8 << 20
    assert _resident_bytes() - before < 64 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_heavy_head_travels_with_the_buffers() -> None:
    value = {"numbers": list(range(1_000_000)), "array": np.arange(100_000)}
    pickled = dumps(value, what="value")
    head, buffers = pickled.head, pickled.buffers
    assert head == b""
    assert len(buffers) == 2
    back = loads(head, [np.frombuffer(buffer, np.uint8) for buffer in buffers])
    assert back["numbers"] == value["numbers"]
    assert (back["array"] == value["array"]).all()


def test_prepared_arguments_are_those_that_are_pickled_at_once() -> None:
    text = "a cell"
    same = (json.dumps, (text, 3), text, None)
    prepared = PreparedArguments(*same)
    for last in ((1, [2, 3], {4: [0.5]}, text, text), 7, ("", b"", None, (text, (text,))), list(range(300))):
        for _ in range(2):
            pickled = prepared.dumps(last)
            assert not pickled.buffers
            assert loads(pickled.head) == ((*same, last), {})
    large = list(range(HEAD_MAX_BYTES))
    pickled = prepared.dumps(large)
    assert not pickled.head
    assert loads(pickled.head, pickled.buffers) == ((*same, large), {})
