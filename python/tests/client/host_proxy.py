"""Forward proxy that sends requests for any host name to an agent of a test.

Programs use it through `HTTP_PROXY` and `HTTPS_PROXY`. A plain request has an absolute URL and is forwarded, one per
connection; an encrypted one arrives as `CONNECT`, and its stream is copied.
"""

from __future__ import annotations

import re
import socket
import socketserver
import threading
from typing import Callable


class HostProxy(socketserver.ThreadingTCPServer):
    """`port_of(host, is_encrypted)` returns the local port for a host."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port_of: Callable[[str, bool], int]) -> None:
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.port_of = port_of
        address = f"http://127.0.0.1:{self.server_address[1]}"
        names = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy")
        self.environment = {**dict.fromkeys(names, address), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}

    def __enter__(self) -> HostProxy:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _ProxyHandler(socketserver.BaseRequestHandler):
    server: HostProxy

    def handle(self) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            more = self.request.recv(65536)
            if not more:
                return
            head += more
        lines, _, rest = head.partition(b"\r\n\r\n")
        method, address, version = lines.split(b"\r\n")[0].decode().split(" ")
        if method == "CONNECT":
            upstream = self._connect(address.rpartition(":")[0], True)
            self.request.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            upstream.sendall(rest)
        else:
            target = re.match(r"http://([^/:]+)(?::\d+)?(/.*)?$", address)
            assert target is not None, address
            upstream = self._connect(target.group(1), False)
            forwarded = [line for line in lines.split(b"\r\n")[1:] if not line.lower().startswith((b"host:", b"connection:"))]
            headers = [f"{method} {target.group(2) or '/'} {version}".encode(), b"host: 127.0.0.1", b"connection: close"]
            upstream.sendall(b"\r\n".join([*headers, *forwarded]) + b"\r\n\r\n" + rest)
        response = threading.Thread(target=_copy_stream, args=(upstream, self.request), daemon=True)
        response.start()
        _copy_stream(self.request, upstream)
        response.join()

    def _connect(self, host: str, is_encrypted: bool) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port_of(host, is_encrypted)))


def _copy_stream(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass
