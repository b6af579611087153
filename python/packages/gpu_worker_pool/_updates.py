"""Log the updates of a client and pass them to its subscribers.

A thread of the native client calls the publisher, so logging works even while the event loop is busy. The publisher does not
refer to the client, since a reference would prevent the client's garbage collection.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, List, Tuple

logger = logging.getLogger("gpu_worker_pool")

Update = Dict[str, Any]
Callback = Callable[[Update], object]

#: Level and message for each kind of update that the program did not cause itself.
_LOG_MESSAGES = {
    "blocked": (logging.INFO, "worker %(worker_id)s blocked: it is waiting for a GPU"),
    "unblocked": (logging.INFO, "worker %(worker_id)s unblocked"),
    "lost": (logging.WARNING, "worker %(worker_id)s lost its GPU on %(endpoint_id)s: %(reason)s"),
    "endpoint_up": (logging.INFO, "endpoint %(endpoint_id)s is available"),
    "endpoint_down": (logging.WARNING, "endpoint %(endpoint_id)s is unavailable: %(error)s"),
}


class UpdatePublisher:
    """Logs updates and calls the subscribers."""

    def __init__(self) -> None:
        self._subscribers: Tuple[Callback, ...] = ()
        #: GPU numbers and lease of each worker with an assignment.
        self.assigned_gpus: Dict[str, Tuple[List[int], int]] = {}

    def __call__(self, update: Update) -> None:
        level, message = _LOG_MESSAGES.get(update["kind"], (logging.NOTSET, ""))
        if message and logger.isEnabledFor(level):
            gpu_ids, lease = self.assigned_gpus.get(update.get("worker_id", ""), (None, None))
            extra: Dict[str, Any] = {name: update[name] for name in ("worker_id", "endpoint_id") if name in update}
            if gpu_ids is not None:
                extra.update(gpu_id=gpu_ids[0] if gpu_ids else None, gpu_ids=gpu_ids, lease=lease)
            logger.log(level, message, update, extra=extra)
        for callback in self._subscribers:
            try:
                callback(update)
            except Exception:
                logger.exception("a subscriber raised an exception for the update %s", update["kind"])

    def add_subscriber(self, callback: Callback) -> None:
        self._subscribers = (*self._subscribers, callback)

    def remove_subscriber(self, callback: Callback) -> bool:
        """Remove a subscriber and return whether any subscriber remains."""
        self._subscribers = tuple(other for other in self._subscribers if other is not callback)
        return bool(self._subscribers)


def call_in_running_loop(callback: Callback) -> Callback:
    """Return a function that calls the callback in the loop that runs now, or directly if no loop is running."""
    from asyncio import get_running_loop

    try:
        loop = get_running_loop()
    except RuntimeError:
        return lambda update: callback(update)

    def schedule_callback(update: Update) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback, update)

    return schedule_callback


def log_assignment(message: str, worker_id: str, endpoint_id: str, gpu_ids: List[int], lease: int) -> None:
    """Log that GPUs were assigned or released, if the logger is enabled."""
    if logger.isEnabledFor(logging.INFO):
        extra = {
            "worker_id": worker_id,
            "endpoint_id": endpoint_id,
            "gpu_id": gpu_ids[0] if gpu_ids else None,
            "gpu_ids": gpu_ids,
            "lease": lease,
        }
        logger.info(message, gpu_ids, endpoint_id, worker_id, extra=extra)
