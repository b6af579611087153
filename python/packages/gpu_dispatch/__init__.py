"""Distribute tasks to long-lived worker processes, one or more for each GPU.

    class Doubler(BaseWorker):
        def setup(self, gpu_id, seed, **kwargs): ...
        def process(self, data): return 2 * data
        def cleanup(self): ...

    Dispatcher(Doubler, gpu_ids=[0, 1]).run(range(100), on_success=lambda task_id, data, worker_id: print(data))
"""

from gpupool._native import __version__
from gpu_dispatch._callbacks import ProgressEvent
from gpu_dispatch.dispatcher import Dispatcher
from gpu_dispatch.protocol import CleanupFailed, SetupFailed, TaskError, TaskStarted, TaskSuccess, TaskTimeout
from gpu_dispatch.worker import BaseWorker

__all__ = [
    "BaseWorker",
    "CleanupFailed",
    "Dispatcher",
    "ProgressEvent",
    "SetupFailed",
    "TaskError",
    "TaskStarted",
    "TaskSuccess",
    "TaskTimeout",
    "__version__",
]
