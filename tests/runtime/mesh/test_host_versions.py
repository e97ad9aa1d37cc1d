"""What differs between hosts, in words."""

from __future__ import annotations

from meshbook.mesh.coming_up import describe_clocks, describe_difference


def test_each_version_that_differs_is_named_with_its_hosts() -> None:
    new, old = {"torch": "2.13.0", "CUDA": "12.8"}, {"torch": "2.12.0", "CUDA": "12.8"}
    assert describe_difference({"a": new, "b": old, "c": new}) == "torch 2.13.0 on a, c and 2.12.0 on b"
    cuda = {"Python": "3.11.7", "CUDA": "12.8"}
    assert describe_difference({"a": cuda, "b": {"Python": "3.11.2"}}) == (
        "Python 3.11.7 on a and 3.11.2 on b; CUDA 12.8 on a and none on b"
    )
    assert describe_difference({"a": new, "b": dict(new)}) == describe_difference({}) == ""


def test_clocks_that_differ_by_more_than_the_answer_took_are_told() -> None:
    clocks = {"a": 1000.5, "b": 938.0, "c": 1100.0, "d": 996.0}
    assert describe_clocks(clocks, 1000.0, 1001.0) == (
        "the clock of b is 62 s behind ours; the clock of c is 99 s ahead of ours"
    )
    assert describe_clocks({"a": 1003.0}, 1000.0, 1001.0) == ""
