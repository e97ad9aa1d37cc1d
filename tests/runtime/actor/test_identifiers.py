"""Monarch's names for identities and transports."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.actor import ChannelTransport, ProcId, Uid, enable_transport, identifiers
from meshbook.errors import UsageError

pytestmark = pytest.mark.monarch

LABELS = st.none() | st.from_regex(r"[a-z][a-zA-Z0-9_-]{0,20}", fullmatch=True)


@given(st.integers(0, 2**64 - 1), LABELS)
def test_what_is_printed_reads_back(value: int, label: str | None) -> None:
    uid = Uid.instance_from_value(value, label)
    again = Uid.from_string(str(uid))
    assert (again, again.label, again.instance_value, hash(again)) == (uid, label, value, hash(uid))
    assert pickle.loads(pickle.dumps(uid)) == uid and str(ProcId(uid)) == str(uid)
    assert ProcId.from_string(str(uid)) == ProcId(uid) and ProcId(uid).label == label


def test_a_name_alone_is_a_singleton_and_a_new_one_is_nobody_elses() -> None:
    local = Uid.from_string("local")
    assert local.is_singleton and not local.is_instance and local.instance_value is None and str(local) == "local"
    assert Uid.instance("a") != Uid.instance("a") and Uid.anonymous().label is None
    assert Uid.instance_from_value(1, "a") == Uid.instance_from_value(1, "b") != local


@pytest.mark.parametrize("text", ["", "A", "a b", "a.b", "a<0>", "a<zzzzzzzzzzzzzzzz>", "a<1>@tcp://b:1"])
def test_texts_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"an Uid is printed as in|is no number of 64 bits"):
        Uid.from_string(text)


def test_values_and_labels_that_are_none() -> None:
    with pytest.raises(UsageError, match="a label is a lower-case letter"):
        Uid.instance("A b")
    for value in (-1, 2**64):
        with pytest.raises(OverflowError, match="64 bits"):
            Uid.instance_from_value(value)
    with pytest.raises(TypeError, match=r"Uid\.anonymous"):
        Uid()
    with pytest.raises(TypeError, match="not of 'a'"):
        ProcId("a")  # type: ignore[arg-type]


def test_one_transport_is_enabled_and_before_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identifiers, "_enabled", None)
    monkeypatch.setattr(identifiers, "has_sessions", lambda: False)
    with pytest.raises(UsageError, match="a transport is tcp, ipc"):
        enable_transport("carrier pigeons")
    enable_transport("tcp")
    enable_transport(ChannelTransport.TcpWithHostname)
    with pytest.raises(RuntimeError, match="one transport is enabled at a time"):
        enable_transport("tcp://127.0.0.1:4444")
    monkeypatch.setattr(identifiers, "_enabled", None)
    monkeypatch.setattr(identifiers, "has_sessions", lambda: True)
    with pytest.raises(RuntimeError, match="this program has meshes already"):
        enable_transport("ipc")
