"""ssh to a machine that is reached by its Jupyter server alone: a ``ProxyCommand`` over a WebSocket.

    Host studio
        ProxyCommand python -m meshbook_extension.ssh_proxy wss://hub.example.org/user/ada/sshd/

ssh speaks with an sshd of the user's own over there, which jupyter-sshd-proxy starts and jupyter-server-proxy passes
bytes to. This end only carries them: their meaning is between ssh and sshd, whose keys still count. The server's token
is read from a file or the environment, since command lines are seen by everybody on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import WebSocketClientConnection, WebSocketClosedError, WebSocketError, websocket_connect

CONNECT_S = 60
"""The time that the server may take, which starts the sshd first."""

PING_S = 20
"""Proxies end connections on which nothing is said, after a minute or so."""

CHUNK = 1 << 16
_TOKENS = ("JUPYTER_TOKEN", "JUPYTERHUB_API_TOKEN")
_REFUSALS = {
    401: "it wants a token",
    403: "it refuses the token, or wants one",
    404: "it has no such page: install jupyter-sshd-proxy there, and start the server again",
    500: "it could not start an sshd: install openssh-server there",
    503: "the server does not run: start it in a browser",
}
_REDIRECTS = (("/login", 403), ("/hub/", 503), ("", 404))
"""The status that a redirect stands for: a login, a hub that has no such server, an address without its slash."""


class ProxyError(Exception):
    """The reason why there is no connection."""


def read_token(file: str | None, environment: Mapping[str, str]) -> str:
    """Return the server's token, from the file or one of the usual variables; empty where there is none."""
    if file is None:
        return next((environment[name] for name in _TOKENS if environment.get(name)), "")
    try:
        return Path(file).expanduser().read_text().strip()
    except OSError as error:
        raise ProxyError(f"the file of the token, {file}, cannot be read: {error.strerror}") from None


async def connect(url: str, token: str) -> WebSocketClientConnection:
    """Open the WebSocket to the server. Raises: ProxyError, in words that ssh shows."""
    if not url.startswith(("ws://", "wss://")):
        raise ProxyError(f"{url} is no address of a WebSocket: one begins with wss://")
    headers = {"Authorization": f"token {token}"} if token else {}
    request = HTTPRequest(url, headers=headers, connect_timeout=CONNECT_S, request_timeout=CONNECT_S)
    request.follow_redirects = False
    try:
        return await asyncio.wait_for(websocket_connect(request, ping_interval=PING_S), CONNECT_S)
    except HTTPClientError as error:
        raise ProxyError(f"{url} answers, but {_refusal(error, token)}") from None
    except WebSocketError:
        raise ProxyError(
            f"{url} answers, but with a page: the address of jupyter-sshd-proxy ends with /sshd/"
        ) from None
    except asyncio.TimeoutError:
        raise ProxyError(f"{url} has not answered in {CONNECT_S} s") from None
    except OSError as error:
        raise ProxyError(f"{url} is not reached: {error.strerror or error}") from None


def _refusal(error: HTTPClientError, token: str) -> str:
    """Explain an answer other than a WebSocket."""
    code = error.code
    if code in (301, 302) and error.response is not None:
        page = error.response.headers.get("Location", "")
        code = next(code for part, code in _REDIRECTS if part in page)
    hint = f" (--token-file FILE, or {' or '.join(_TOKENS)})" if code in (401, 403) and not token else ""
    return _REFUSALS.get(code, f"{error.code} {error.message}") + hint


async def carry(url: str, token: str) -> None:
    """Pass bytes from stdin to the server, and from it to stdout, until either has ended. Raises: ProxyError."""
    socket = await connect(url, token)
    if socket.protocol is not None:
        socket.protocol.set_nodelay(True)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=CHUNK)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout.buffer)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)

    async def send() -> None:
        while data := await reader.read(CHUNK):
            await socket.write_message(data, binary=True)

    async def receive() -> None:
        while (message := await socket.read_message()) is not None:
            writer.write(message if isinstance(message, bytes) else message.encode())
            await writer.drain()

    ways = [asyncio.ensure_future(send()), asyncio.ensure_future(receive())]
    done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    socket.close()
    for way in ways:
        way.cancel()
    for way in done:
        if not isinstance(way.exception(), (WebSocketClosedError, ConnectionError, type(None))):
            way.result()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns: its exit code."""
    parser = argparse.ArgumentParser("python -m meshbook_extension.ssh_proxy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("url", help="of the server's jupyter-sshd-proxy, as wss://hub.example.org/user/ada/sshd/")
    parser.add_argument("--token-file", help=f"that has the server's token; by default {' or '.join(_TOKENS)}")
    given = parser.parse_args(arguments)
    try:
        asyncio.run(carry(given.url, read_token(given.token_file, os.environ)))
    except ProxyError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
