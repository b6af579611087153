"""An ASGI app that answers the statistics routes by asking a `gpupool serve` of its own.

Only `GET`, and only routes that tell: whoever reaches this app would be taken for the user it runs as, so nothing that
changes a lease, or holds one, is passed on.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Awaitable, Callable, Dict, List, MutableMapping, Tuple

if TYPE_CHECKING:
    import asyncio

    from ._serving_child import ServingChild

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = List[Tuple[bytes, bytes]]

_CHUNK = 64 * 1024
_HEAD_BYTES = 64 * 1024
#: What belongs to one connection, and not to the answer.
_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server"}
#: What the child may hear from whoever asks.
_PASSED_ON = {b"accept", b"accept-encoding", b"if-none-match", b"origin"}


class StatisticsApp:
    """The app. Its child is started with the first request, or before where the server says that it starts."""

    def __init__(self) -> None:
        self._child: ServingChild | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self._socket()
                except Exception as error:
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.startup.complete"})
            else:
                if self._child is not None:
                    await _in_thread(self._child.stop)
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _answer(self, scope: Scope, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            return await _refuse(send, 405, "only GET is answered here", [(b"allow", b"GET, HEAD")])
        path = scope.get("raw_path", scope["path"].encode()).split(b"?")[0].decode("latin-1")
        path = path[len(scope.get("root_path", "")) :] if path.startswith(scope.get("root_path", "") or "\0") else path
        if not _is_told(path):
            return await _refuse(send, 404, f"{path} is not served here; this app has statistics only", [])
        socket = await self._socket()
        try:
            reader, writer, (status, headers) = await _ask(socket, path, scope)
        except (OSError, EOFError):
            # It has died: once more, with another one.
            assert self._child is not None
            await _in_thread(self._child.forget, socket)
            reader, writer, (status, headers) = await _ask(await self._socket(), path, scope)
        try:
            if path.endswith("/config") and status == 200 and scope["method"] == "GET":
                return await _send(send, status, _at(scope, await reader.read()), [])
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await _pass_on(reader, send)
        finally:
            writer.close()

    async def _socket(self) -> str:
        if self._child is None:
            from ._serving_child import ServingChild

            self._child = ServingChild()
        socket: str = await _in_thread(self._child.socket)
        return socket


async def _ask(
    socket: str, path: str, scope: Scope
) -> Tuple[asyncio.StreamReader, asyncio.StreamWriter, Tuple[int, Headers]]:
    """Asks the child, and reads how its answer begins."""
    import asyncio

    reader, writer = await asyncio.open_unix_connection(socket, limit=_HEAD_BYTES)
    try:
        writer.write(_question(path, scope))
        await writer.drain()
        return reader, writer, _head(await reader.readuntil(b"\r\n\r\n"))
    except BaseException:
        writer.close()
        raise


def _is_told(path: str) -> bool:
    """Whether a route only tells statistics."""
    prefix = os.environ.get("API_PREFIX", "").rstrip("/")
    if ".." in path or "%" in path or "\\" in path:
        return False
    bare = path[len(prefix) :] if prefix and path.startswith(prefix) else path
    pages = [os.environ.get("DOCS_URL") or "/docs", os.environ.get("REDOC_URL") or "/redoc"]
    is_page = any(bare == page or bare.startswith(f"{page.rstrip('/')}/") for page in pages if page != "/")
    is_fact = bare in ("", "/", "/health", "/config", "/openapi.json") or bare.startswith("/gpu/")
    return (is_page or is_fact) and not bare.startswith("/v1")


def _question(path: str, scope: Scope) -> bytes:
    query = scope.get("query_string", b"")
    lines = [f"{scope['method']} {path}".encode("latin-1") + (b"?" + query if query else b"") + b" HTTP/1.0"]
    said: Dict[bytes, bytes] = {name: value for name, value in scope["headers"] if name in _PASSED_ON}
    if path.rstrip("/") == os.environ.get("API_PREFIX", "").rstrip("/"):
        # The dashboard needs routes that are not served here.
        said[b"accept"] = b"application/json"
    lines += [b"host: localhost", *(name + b": " + value for name, value in said.items())]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _head(said: bytes) -> Tuple[int, Headers]:
    first, *lines = said.rstrip(b"\r\n").split(b"\r\n")
    pairs = (line.partition(b":") for line in lines)
    headers = [(name.strip().lower(), value.strip()) for name, _, value in pairs]
    return int(first.split(b" ")[1]), [(name, value) for name, value in headers if name not in _HOP]


async def _pass_on(reader: asyncio.StreamReader, send: Send) -> None:
    while True:
        chunk = await reader.read(_CHUNK)
        await send({"type": "http.response.body", "body": chunk, "more_body": bool(chunk)})
        if not chunk:
            return


def _at(scope: Scope, config: bytes) -> Any:
    """The child's configuration with the address people reach, which is this app's."""
    import json

    said = json.loads(config)
    host, port = scope.get("server") or ("", None)
    said["server"].update(host=host, port=port or 0)
    return said


async def _refuse(send: Send, status: int, detail: str, headers: Headers) -> None:
    await _send(send, status, {"detail": detail}, headers)


async def _send(send: Send, status: int, said: Any, headers: Headers) -> None:
    import json

    body = json.dumps(said).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    import asyncio

    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)
