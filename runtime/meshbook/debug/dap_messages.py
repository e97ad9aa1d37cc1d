"""Messages of the Debug Adapter Protocol as they travel between debuggers: a header with the length, then JSON."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from meshbook.errors import PeerProtocolError

Message: TypeAlias = dict[str, Any]

MESSAGE_MAX_BYTES = 1 << 24
_HEADER_MAX_BYTES = 1 << 10
_END = b"\r\n\r\n"
_decode = msgspec.json.Decoder(Message).decode


def pack(message: Message) -> bytes:
    """The bytes of a message."""
    body = msgspec.json.encode(message)
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


class MessageReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self, max_bytes: int = MESSAGE_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole by now. Raises: PeerProtocolError for what is no message, or too long."""
        self._data += data
        found = []
        while (message := self._next()) is not None:
            found.append(message)
        return found

    def _next(self) -> Message | None:
        end = self._data.find(_END)
        if end < 0:
            if len(self._data) > _HEADER_MAX_BYTES:
                raise PeerProtocolError("a debugger's message without a header")
            return None
        start, size = end + len(_END), self._body_bytes(bytes(self._data[:end]))
        if len(self._data) < start + size:
            return None
        body = bytes(self._data[start : start + size])
        del self._data[: start + size]
        try:
            return _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PeerProtocolError(f"a debugger's message that is not JSON: {error}") from None

    def _body_bytes(self, header: bytes) -> int:
        for line in header.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-length" and value.strip().isdigit() and len(value) < 20:
                size = int(value)
                if size <= self._max_bytes:
                    return size
        raise PeerProtocolError("a debugger's message without a sensible length")


def answer(request: Message, body: Message | None = None, *, failure: str = "") -> Message:
    """The response to a request, its failure where ``failure`` says why."""
    response: Message = {
        "type": "response",
        "seq": 0,
        "request_seq": request.get("seq", 0),
        "command": request.get("command", ""),
        "success": not failure,
        "body": body or {},
    }
    return {**response, "message": failure} if failure else response
