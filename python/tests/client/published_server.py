"""Statistics-only server with the routes of the published server, without `/v1`."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class PublishedServer(ThreadingHTTPServer):
    """`usage` has the memory usage and the utilization of each GPU in percent; a test can change it."""

    daemon_threads = True

    def __init__(self, *usage: tuple[float, float]) -> None:
        super().__init__(("127.0.0.1", 0), _StatisticsHandler)
        self.usage = list(usage)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> PublishedServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def summary(self) -> dict[str, object]:
        count = len(self.usage)
        return {
            "gpu_count": count,
            "total_memory_mb": 80_000 * count,
            "total_used_memory_mb": 0,
            "total_memory_usage_percent": 0.0,
            "average_utilization_percent": 0.0,
            "gpus_summary": [
                {"gpu_id": gpu, "name": "A100", "memory_usage_percent": memory, "utilization_percent": busy}
                for gpu, (memory, busy) in enumerate(self.usage)
            ],
            "timestamp": "2025-01-01T00:00:00",
        }


class _StatisticsHandler(BaseHTTPRequestHandler):
    server: PublishedServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        routes = {"/gpu/summary": self.server.summary, "/health": lambda: {"status": "healthy"}}
        route = routes.get(self.path)
        body = json.dumps(route() if route else {"detail": "Not Found"}).encode()
        self.send_response(200 if route else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass
