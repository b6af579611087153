"""ASGI app that serves the statistics routes from a private `gpupool serve`.

The app forwards only `GET` requests for statistics. It rejects all routes that create, change or hold a lease: the agent sees
every client of this app as the local user that runs the app.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Awaitable, Callable, Dict, List, MutableMapping, Tuple

if TYPE_CHECKING:
    import asyncio

    from ._agent_process import AgentProcess

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = List[Tuple[bytes, bytes]]

_CHUNK_BYTES = 64 * 1024
_HEAD_BYTES = 64 * 1024
#: Headers that belong to one connection.
_HOP_BY_HOP_HEADERS = {b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server"}
#: Request headers that are forwarded to the agent.
_FORWARDED_HEADERS = {b"accept", b"accept-encoding", b"if-none-match", b"origin"}


class StatisticsApp:
    """ASGI app. Its agent starts with the server's lifespan, or else with the first request."""

    def __init__(self) -> None:
        self._agent: AgentProcess | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        elif scope["type"] == "http":
            await self._serve_request(scope, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self._start_agent()
                except Exception as error:
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.startup.complete"})
            else:
                if self._agent is not None:
                    await _in_thread(self._agent.stop)
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _serve_request(self, scope: Scope, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            return await _send_error(send, 405, "only GET is allowed", [(b"allow", b"GET, HEAD")])
        path = scope.get("raw_path", scope["path"].encode()).split(b"?")[0].decode("latin-1")
        path = path[len(scope.get("root_path", "")) :] if path.startswith(scope.get("root_path", "") or "\0") else path
        if not _is_statistics_route(path):
            return await _send_error(send, 404, f"{path} is not served here; this app serves only statistics", [])
        socket_path = await self._start_agent()
        try:
            reader, writer, (status, headers) = await _forward_request(socket_path, path, scope)
        except (OSError, EOFError):
            # The agent died: retry once with a new one.
            assert self._agent is not None
            await _in_thread(self._agent.discard, socket_path)
            reader, writer, (status, headers) = await _forward_request(await self._start_agent(), path, scope)
        try:
            if path.endswith("/config") and status == 200 and scope["method"] == "GET":
                return await _send_json(send, status, _with_server_address(scope, await reader.read()), [])
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await _stream_body(reader, send)
        finally:
            writer.close()

    async def _start_agent(self) -> str:
        if self._agent is None:
            from ._agent_process import AgentProcess

            self._agent = AgentProcess()
        socket_path: str = await _in_thread(self._agent.socket_path)
        return socket_path


async def _forward_request(
    socket_path: str, path: str, scope: Scope
) -> Tuple[asyncio.StreamReader, asyncio.StreamWriter, Tuple[int, Headers]]:
    """Send the request to the agent and read the head of its response."""
    import asyncio

    reader, writer = await asyncio.open_unix_connection(socket_path, limit=_HEAD_BYTES)
    try:
        writer.write(_request_head(path, scope))
        await writer.drain()
        return reader, writer, _parse_response_head(await reader.readuntil(b"\r\n\r\n"))
    except BaseException:
        writer.close()
        raise


def _is_statistics_route(path: str) -> bool:
    """Return whether a route serves only statistics or their documentation."""
    prefix = os.environ.get("API_PREFIX", "").rstrip("/")
    if ".." in path or "%" in path or "\\" in path:
        return False
    bare = path[len(prefix) :] if prefix and path.startswith(prefix) else path
    pages = [os.environ.get("DOCS_URL") or "/docs", os.environ.get("REDOC_URL") or "/redoc"]
    is_page = any(bare == page or bare.startswith(f"{page.rstrip('/')}/") for page in pages if page != "/")
    is_data = bare in ("", "/", "/health", "/config", "/openapi.json") or bare.startswith("/gpu/")
    return (is_page or is_data) and not bare.startswith("/v1")


def _request_head(path: str, scope: Scope) -> bytes:
    query = scope.get("query_string", b"")
    lines = [f"{scope['method']} {path}".encode("latin-1") + (b"?" + query if query else b"") + b" HTTP/1.0"]
    headers: Dict[bytes, bytes] = {name: value for name, value in scope["headers"] if name in _FORWARDED_HEADERS}
    if path.rstrip("/") == os.environ.get("API_PREFIX", "").rstrip("/"):
        # The dashboard needs routes that this app does not serve.
        headers[b"accept"] = b"application/json"
    lines += [b"host: localhost", *(name + b": " + value for name, value in headers.items())]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _parse_response_head(head: bytes) -> Tuple[int, Headers]:
    first, *lines = head.rstrip(b"\r\n").split(b"\r\n")
    pairs = (line.partition(b":") for line in lines)
    headers = [(name.strip().lower(), value.strip()) for name, _, value in pairs]
    return int(first.split(b" ")[1]), [(name, value) for name, value in headers if name not in _HOP_BY_HOP_HEADERS]


async def _stream_body(reader: asyncio.StreamReader, send: Send) -> None:
    while True:
        chunk = await reader.read(_CHUNK_BYTES)
        await send({"type": "http.response.body", "body": chunk, "more_body": bool(chunk)})
        if not chunk:
            return


def _with_server_address(scope: Scope, config: bytes) -> Any:
    """Return the agent's configuration with the address of the ASGI server."""
    import json

    settings = json.loads(config)
    host, port = scope.get("server") or ("", None)
    settings["server"].update(host=host, port=port or 0)
    return settings


async def _send_error(send: Send, status: int, detail: str, headers: Headers) -> None:
    await _send_json(send, status, {"detail": detail}, headers)


async def _send_json(send: Send, status: int, content: Any, headers: Headers) -> None:
    import json

    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    import asyncio

    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)
