"""Monarch's names for identities and ways of transport, for programs that read, compare or pass them on.

Meshes have a `name` and an `id` here, and transports are chosen: nothing of ours asks for these.
"""

from __future__ import annotations

import enum
import re
import secrets
import threading
from urllib.parse import urlsplit

from meshbook.actor.router import has_sessions
from meshbook.errors import UsageError

_DIGITS = "123456789abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ"
_TEXT = re.compile(r"(?P<label>[a-z][a-zA-Z0-9_-]*)?(?:<(?P<number>[^<>]+)>)?")
_VALUES = 1 << 64


class Uid:
    """An identity: of one thing of a kind (``trainer<4fK>``), or of the only thing of a name (``local``)."""

    __slots__ = ("_label", "_value")
    _label: str | None
    _value: int | None

    def __init__(self) -> None:
        raise TypeError("an Uid is made by Uid.anonymous(), Uid.instance(label) or Uid.from_string(text)")

    @classmethod
    def _of(cls, value: int | None, label: str | None) -> Uid:
        uid = object.__new__(cls)
        uid._value, uid._label = value, label
        return uid

    @classmethod
    def anonymous(cls) -> Uid:
        """A new one without a label."""
        return cls._of(secrets.randbits(64), None)

    @classmethod
    def instance(cls, label: str | None = None) -> Uid:
        """A new one. Raises: UsageError for a label that is none."""
        return cls.instance_from_value(secrets.randbits(64), label)

    @classmethod
    def instance_from_value(cls, value: int, label: str | None = None) -> Uid:
        """That of a number of 64 bits. Raises: OverflowError, UsageError."""
        if not 0 <= value < _VALUES:
            raise OverflowError(f"an Uid has a number of 64 bits without a sign, not {value}")
        if label is not None and (not (found := _TEXT.fullmatch(label)) or found["label"] != label):
            raise UsageError(f"a label is a lower-case letter, then letters, digits, _ and -; not {label!r}.")
        return cls._of(value, label)

    @classmethod
    def from_string(cls, uid: str) -> Uid:
        """The one that is printed so. Raises: UsageError."""
        found = _TEXT.fullmatch(uid)
        if found is None or not uid:
            raise UsageError(f"an Uid is printed as in local, trainer<4fK> or <4fK>, not as {uid!r}.")
        if found["number"] is None:
            return cls._of(None, found["label"])
        value = 0
        for digit in found["number"]:
            value = value * 58 + _DIGITS.find(digit) if digit in _DIGITS else _VALUES
        if value >= _VALUES:
            raise UsageError(f"<{found['number']}> is no number of 64 bits to the base of 58.")
        return cls._of(value, found["label"])

    @property
    def label(self) -> str | None:
        return self._label

    @property
    def is_instance(self) -> bool:
        return self._value is not None

    @property
    def is_singleton(self) -> bool:
        return self._value is None

    @property
    def instance_value(self) -> int | None:
        """Its number."""
        return self._value

    @property
    def _key(self) -> object:
        return self._label if self._value is None else self._value

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Uid) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[object, ...]:
        return Uid.from_string, (str(self),)

    def __str__(self) -> str:
        if (value := self._value) is None:
            return self._label or ""
        digits = ""
        while value or not digits:
            value, digit = divmod(value, 58)
            digits = _DIGITS[digit] + digits
        return f"{self._label or ''}<{digits}>"

    def __repr__(self) -> str:
        return f"Uid({str(self)!r})"


class ProcId:
    """The identity of a process."""

    __slots__ = ("uid",)

    def __init__(self, uid: Uid) -> None:
        if not isinstance(uid, Uid):
            raise TypeError(f"a ProcId is made of an Uid, not of {uid!r}")
        self.uid = uid

    @classmethod
    def from_string(cls, proc_id: str) -> ProcId:
        """The one that is printed so. Raises: UsageError."""
        return cls(Uid.from_string(proc_id))

    @property
    def label(self) -> str | None:
        return self.uid.label

    def __eq__(self, other: object) -> bool:
        return self.uid == other.uid if isinstance(other, ProcId) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.uid)

    def __str__(self) -> str:
        return str(self.uid)

    def __repr__(self) -> str:
        return f"ProcId({str(self)!r})"


class ChannelTransport(enum.Enum):
    """How processes may reach each other."""

    TcpWithLocalhost = "tcp(localhost)"
    TcpWithHostname = "tcp(hostname)"
    MetaTlsWithHostname = "metatls(hostname)"
    MetaTlsWithIpV6 = "metatls(ipv6)"
    MetaQuicWithHostname = "metaquic(hostname)"
    MetaQuicWithIpV6 = "metaquic(ipv6)"
    Tls = "tls"
    Quic = "quic"
    Local = "local"
    Unix = "unix"

    def get(self) -> ChannelTransport:
        """Itself: Monarch's programs ask one that may be a transport or a name so."""
        return self


_SHORT = {
    "tcp": ChannelTransport.TcpWithHostname,
    "ipc": ChannelTransport.Unix,
    "metatls": ChannelTransport.MetaTlsWithIpV6,
    "metatls-hostname": ChannelTransport.MetaTlsWithHostname,
    "tls": ChannelTransport.Tls,
    "quic": ChannelTransport.Quic,
    "unix": ChannelTransport.Unix,
    "local": ChannelTransport.Local,
}


class BindSpec:
    """A transport as settings tell it: a member of ChannelTransport, or an address. Equal to others of the same."""

    def __init__(self, spec: object) -> None:
        """spec: one of these, or a short name, as in ``tcp``. Raises: UsageError for a text that is none; TypeError."""
        found = _SHORT.get(spec, spec) if isinstance(spec, str) else spec
        if isinstance(found, str) and not _is_address(found):
            raise UsageError(f'a transport is {", ".join(_SHORT)}, an address as in "tcp://10.0.0.5:4444", or a member '
                             f"of ChannelTransport; not {spec!r}.")  # fmt: skip
        if not isinstance(found, ChannelTransport | BindSpec | str):
            raise TypeError(f"a transport is a ChannelTransport or a text, not {spec!r}.")
        self.value: str = found if isinstance(found, str) else found.value

    def __eq__(self, other: object) -> bool:
        return self.value == other.value if isinstance(other, BindSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.value)

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return f"BindSpec({self.value!r})"


_lock = threading.Lock()
_enabled: BindSpec | None = None


def enabled_transport() -> BindSpec:
    """What `enable_transport` was told; by default that of one machine."""
    return _enabled or BindSpec(ChannelTransport.Unix)


def enable_transport(transport: ChannelTransport | str) -> None:
    """Say how processes are to reach each other. It is checked, and changes nothing: hosts know how they are reached.

    On one machine that is by Unix sockets; between machines by TCP, always encrypted.
    The setting ``default_transport`` reads back as it. Raises: UsageError, TypeError for what is no transport;
    RuntimeError for another one than before, or after the first mesh.
    """
    global _enabled
    asked = BindSpec(transport)
    with _lock:
        if asked == _enabled:
            return
        if _enabled is not None:
            raise RuntimeError(f"one transport is enabled at a time: that was {_enabled}, so {asked} cannot be")
        if has_sessions():
            raise RuntimeError("enable_transport() comes before all else: this program has meshes already")
        _enabled = asked


def _is_address(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("tcp", "ipc", "metatls", "tls", "unix", "local") and bool(url.netloc or url.path)
    except ValueError:
        return False
