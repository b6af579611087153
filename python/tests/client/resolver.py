"""Host names for tests: a forward proxy that takes questions for any host to an agent of this test.

Programs reach it through `HTTP_PROXY` and `HTTPS_PROXY`. Plain questions come with their whole address and are passed on, one a
connection; encrypted ones come as `CONNECT` and are not looked into.
"""

from __future__ import annotations

import re
import socket
import socketserver
import threading
from typing import Callable


class Resolver(socketserver.ThreadingTCPServer):
    """`port_of(host, is_encrypted)` says where a host really answers."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port_of: Callable[[str, bool], int]) -> None:
        super().__init__(("127.0.0.1", 0), _Passes)
        self.port_of = port_of
        address = f"http://127.0.0.1:{self.server_address[1]}"
        names = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy")
        self.environment = {**dict.fromkeys(names, address), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}

    def __enter__(self) -> Resolver:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Passes(socketserver.BaseRequestHandler):
    server: Resolver

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
            found = re.match(r"http://([^/:]+)(?::\d+)?(/.*)?$", address)
            assert found is not None, address
            upstream = self._connect(found.group(1), False)
            kept = [line for line in lines.split(b"\r\n")[1:] if not line.lower().startswith((b"host:", b"connection:"))]
            ours = [f"{method} {found.group(2) or '/'} {version}".encode(), b"host: 127.0.0.1", b"connection: close"]
            upstream.sendall(b"\r\n".join([*ours, *kept]) + b"\r\n\r\n" + rest)
        back = threading.Thread(target=_pass_on, args=(upstream, self.request), daemon=True)
        back.start()
        _pass_on(self.request, upstream)
        back.join()

    def _connect(self, host: str, is_encrypted: bool) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port_of(host, is_encrypted)))


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass
