"""The statistics server: `python -m gpu_worker_pool.gpu_server`, or `uvicorn gpu_worker_pool.gpu_server:app`.

Run as a program it is `gpupool serve`, with the same variables and arguments. `app` is for ASGI servers: it answers the
statistics routes from a `gpupool serve` of its own, and no others.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not __package__:
    # Run as a file: the packages are beside the folder it is in, and its neighbours are no modules of their own.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from gpu_worker_pool._statistics_app import StatisticsApp

__all__ = ["app", "main"]

#: For ASGI servers.
app = StatisticsApp()


def main() -> None:
    """Becomes `gpupool serve`, with the arguments of this program."""
    from gpupool import _command

    command = _command.find()
    sys.stdout.flush()
    os.execv(command, [command, "serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
