"""What happens to a client, logged and told to whoever subscribed.

Called by a thread of the native client, so it needs no event loop to be idle. Knows names and numbers only: were it to refer
to the client, the client could not be collected.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, List, Tuple

logger = logging.getLogger("gpu_worker_pool")

Update = Dict[str, Any]
Callback = Callable[[Update], object]

#: Level and words for each kind of update that is not this program's own doing.
_SAID = {
    "blocked": (logging.INFO, "worker %(worker_id)s blocked: it waits for a GPU"),
    "unblocked": (logging.INFO, "worker %(worker_id)s unblocked"),
    "lost": (logging.WARNING, "worker %(worker_id)s lost its GPU on %(endpoint_id)s: %(reason)s"),
    "endpoint_up": (logging.INFO, "endpoint %(endpoint_id)s can be asked"),
    "endpoint_down": (logging.WARNING, "endpoint %(endpoint_id)s is left alone for a while: %(error)s"),
}


class Relay:
    """Logs updates and tells them on."""

    def __init__(self) -> None:
        self._callbacks: Tuple[Callback, ...] = ()
        #: Numbers of GPUs and lease of each worker that holds something.
        self.held: Dict[str, Tuple[List[int], int]] = {}

    def __call__(self, update: Update) -> None:
        level, words = _SAID.get(update["kind"], (logging.NOTSET, ""))
        if words and logger.isEnabledFor(level):
            gpu_ids, lease = self.held.get(update.get("worker_id", ""), (None, None))
            extra: Dict[str, Any] = {name: update[name] for name in ("worker_id", "endpoint_id") if name in update}
            if gpu_ids is not None:
                extra.update(gpu_id=gpu_ids[0] if gpu_ids else None, gpu_ids=gpu_ids, lease=lease)
            logger.log(level, words, update, extra=extra)
        for callback in self._callbacks:
            try:
                callback(update)
            except Exception:
                logger.exception("a subscriber failed with %s", update["kind"])

    def add(self, callback: Callback) -> None:
        self._callbacks = (*self._callbacks, callback)

    def remove(self, callback: Callback) -> bool:
        """Whether anybody is left."""
        self._callbacks = tuple(other for other in self._callbacks if other is not callback)
        return bool(self._callbacks)


def in_running_loop(callback: Callback) -> Callback:
    """Calls a function in the event loop that runs now; where none does, in whatever thread tells."""
    from asyncio import get_running_loop

    try:
        loop = get_running_loop()
    except RuntimeError:
        return lambda update: callback(update)

    def tell(update: Update) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback, update)

    return tell


def log_assignment(words: str, worker_id: str, endpoint_id: str, gpu_ids: List[int], lease: int) -> None:
    """Says that GPUs were assigned or released; costs nothing where nobody reads it."""
    if logger.isEnabledFor(logging.INFO):
        extra = {
            "worker_id": worker_id,
            "endpoint_id": endpoint_id,
            "gpu_id": gpu_ids[0] if gpu_ids else None,
            "gpu_ids": gpu_ids,
            "lease": lease,
        }
        logger.info(words, gpu_ids, endpoint_id, worker_id, extra=extra)
