"""Pushed functions and classes read the ranks' names; instances that arrive reset no class there."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def book(empty_notebook) -> Any:
    empty_notebook.run("%mesh spawn gpus=2 --device cpu --out procs")
    return empty_notebook


def values(book: Any, expression: str) -> list[Any]:
    book.run(f"%mesh eval {expression}")
    return list(book["_mesh"].values())


def test_functions_read_what_is_pushed_or_set_later(book) -> None:
    book.run("lr = 0.25\ndef helper(v): return v * lr\ndef step(v): return helper(v)\n%mesh push step lr")
    assert values(book, "(lr, step(8))") == [(0.25, 2.0)] * 2
    assert "of this rank" not in book.run("lr = 0.5\n%mesh push lr").stdout
    assert values(book, "(lr, step(8))") == [(0.5, 4.0)] * 2
    book.run("%%mesh\nlr = 100.0 + rank")
    assert values(book, "step(1)") == [100.0, 101.0]
    told = book.run("%mesh push step").stdout
    assert (
        "[0] what was pushed reads lr of this rank (100.0), not of the notebook (0.5); push lr as well to send it"
        in told
    )
    assert "of this rank" not in book.run("%mesh push step").stdout, "it is said once"
    assert values(book, "step(1)") == [100.0, 101.0]


def test_what_functions_bring_is_there_for_cells_until_a_cell_says_else(book) -> None:
    book.run("def inner(): return 'first'\ndef outer(): return inner()\n%mesh push outer")
    assert values(book, "(outer(), inner())") == [("first", "first")] * 2
    book.run("def inner(): return 'second'\n%mesh push outer")
    assert values(book, "outer()") == ["second"] * 2, "what nothing else has bound is sent again"
    book.run("%%mesh\ndef inner(): return rank")
    book.run("def inner(): return 'third'\n%mesh push outer")
    assert values(book, "outer()") == [0, 1]
    book.run("def inner(): return 'fourth'\n%mesh push inner")
    assert values(book, "outer()") == ["fourth"] * 2


def test_classes_and_global_statements_mean_the_ranks_names(book) -> None:
    book.run("depth = 2\nclass Net:\n    def __init__(self): self.depth = depth\n%mesh push Net")
    book.run("depth = 5\n%mesh push depth")
    assert values(book, "Net().depth") == [5] * 2
    book.run("%%mesh\ndepth = 10 + rank")
    book.run("def depth_of(net): return type(net)().depth\nfound = procs.execute(depth_of, Net()).get()")
    assert list(book["found"].values()) == [10, 11], "an instance that comes by a call resets no method"
    book.run("def count():\n    global counted\n    counted = rank + 1\n%mesh push count")
    assert book.run("%%mesh\ncount()\ncounted").plain.strip() == "[0] 1\n[1] 2"


def test_names_that_only_the_ranks_have_are_found(book) -> None:
    book.run("def who(): return rank, dist.get_rank(), world_size\n%mesh push who")
    assert values(book, "who()") == [(0, 0, 2), (1, 1, 2)]
    book.run("found = procs.execute(who).get()")
    assert list(book["found"].values()) == [(0, 0, 2), (1, 1, 2)]
    book.run("def nowhere(): return no_such_name\n%mesh push nowhere")
    assert "name 'no_such_name' is not defined" in book.fail("%%mesh\nnowhere()")
    assert "name 'no_such_name' is not defined" in book.fail("procs.execute(nowhere).get()")


def test_instances_keep_what_ranks_have_set_of_their_class(book) -> None:
    book.run("class Counter:\n    n = 0\n    kept = {}\n    def use(self): return type(self).n\n%mesh push Counter")
    book.run("%%mesh\nCounter.n = 100 + rank; Counter.kept['k'] = rank")
    book.run("counter = Counter()\n%mesh push counter")
    assert values(book, "(Counter.n, Counter.kept)") == [(100, {"k": 0}), (101, {"k": 1})]
    book.run("found = procs.execute(lambda c: c.use(), Counter()).get()")
    assert list(book["found"].values()) == [100, 101]
    book.run("%mesh pull counter")
    assert book["Counter"].n == 0 and type(book["counter"].get(0)) is book["Counter"]
    book.run("Counter.n = 7\n%mesh push counter")
    assert values(book, "(Counter.n, Counter.kept)") == [(7, {"k": 0}), (7, {"k": 1})], "the notebook has changed one"
    book.run("%mesh push Counter")
    assert values(book, "(Counter.n, Counter.kept)") == [(7, {})] * 2, "the class itself was pushed"


def test_methods_of_classes_that_calls_bring_are_as_the_notebook_has_them(book) -> None:
    book.run(
        "rate = 1\n"
        "class Rated:\n"
        "    calls = 0\n"
        "    def rated(self):\n"
        "        type(self).calls += 1\n"
        "        return rate"
    )
    book.run("def ask(rated): return rated.rated(), type(rated).calls")
    assert list(book.run("found = procs.execute(ask, Rated()).get()") and book["found"].values()) == [(1, 1)] * 2
    book.run("rate = 2\nfound = procs.execute(ask, Rated()).get()")
    assert list(book["found"].values()) == [(2, 2)] * 2
    book.run("Rated.rated = lambda self: 'mended'\nfound = procs.execute(ask, Rated()).get()")
    assert list(book["found"].values()) == [("mended", 2)] * 2


def test_an_actor_counts_in_the_class_of_what_it_is_given(book) -> None:
    book.run(
        "from meshbook.actor import Actor, endpoint\n"
        "class Given:\n    n = 0\n"
        "class User(Actor):\n"
        "    calls = 0\n"
        "    @endpoint\n"
        "    def use(self, given):\n"
        "        type(given).n += 1; User.calls += 1\n"
        "        return type(given).n, User.calls\n"
        "user = procs.slice(gpus=0).spawn('user', User)\n"
        "counted = [user.use.call_one(Given()).get() for _ in range(3)]"
    )
    assert book["counted"] == [(1, 1), (2, 2), (3, 3)]


def test_an_instance_brings_its_class_so_that_ranks_can_pickle_it(book) -> None:
    book.run("class Alone:\n    def __init__(self): self.v = 3\nalone = Alone()\n%mesh push alone")
    ran = book.run("%%mesh\nimport pickle\nobjects = [None] * 2; dist.all_gather_object(objects, alone)\nobjects[1].v")
    assert ran.plain.strip() == "[0,1] 3"


def test_pushed_functions_and_classes_have_their_source(book) -> None:
    book.run("def inside(v):\n    return 1 / v\ndef around(v):\n    return inside(v)\n%mesh push around")
    said = book.fail("%%mesh\naround(0)")
    assert "return 1 / v" in said and "return inside(v)" in said
    assert book.run("%%mesh\nimport inspect\ninspect.getsource(around)").plain.count("return inside(v)") == 1
    book.run("class Sourced:\n    def raises(self):\n        raise OSError('from there')\nsourced = Sourced()")
    book.run("%mesh push sourced")
    assert "raise OSError('from there')" in book.fail("%%mesh\nsourced.raises()")
