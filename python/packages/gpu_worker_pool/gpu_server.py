"""Statistics server: `python -m gpu_worker_pool.gpu_server`, or `uvicorn gpu_worker_pool.gpu_server:app`.

As a program it runs `gpupool serve`, with the same variables and arguments. `app` is for ASGI servers: it serves only the
statistics routes, from a private `gpupool serve`.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not __package__:
    # Run as a file: import packages from the parent directory, and none of this directory's files as top-level modules.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from gpu_worker_pool._statistics_app import StatisticsApp

__all__ = ["app", "main"]

#: ASGI application.
app = StatisticsApp()


def main() -> None:
    """Replace this process by `gpupool serve`, with the same arguments."""
    from gpupool import _command_path

    command = _command_path.find_command()
    sys.stdout.flush()
    os.execv(command, [command, "serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
