"""Calls the callbacks of a run for its events."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Optional

from gpu_dispatch.protocol import CleanupFailed, SetupFailed, TaskError, TaskStarted, TaskSuccess, TaskTimeout

if TYPE_CHECKING:
    from gpu_dispatch.dispatcher import Dispatcher

log = logging.getLogger("gpu_dispatch")

OnSuccess = Callable[[int, Any, int], Any]
OnError = Callable[[int, str, Optional[int]], Any]
OnTimeout = Callable[[int, float, int], Any]


@dataclass
class ProgressEvent:
    """Event of a run.

    `kind` is `started`, `success`, `error`, `timeout`, `cancelled`, `retried`, `ready`, `setup_failed`, `cleanup_failed` or
    `worker_gone`; with leased GPUs also `granted`, `gpu_lost` or `gpu_note`. A field that does not apply is `None`. Times are
    Unix times in seconds.
    """

    kind: str
    task_id: Optional[int]
    worker_id: Optional[int]
    gpu_id: Optional[int]
    started_at: Optional[float]
    finished_at: Optional[float]
    stats: dict[str, Any]
    #: Equivalent message of `gpu_dispatch.protocol`, if the kind has one.
    message: Any = None


class RunCallbacks:
    """Logs each event of a run and calls its callbacks."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        on_success: OnSuccess,
        on_error: Optional[OnError],
        on_timeout: Optional[OnTimeout],
        on_setup_fail: Optional[Callable[[int, str], Any]],
        on_task_start: Optional[Callable[[int, int], Any]],
    ) -> None:
        self._dispatcher = dispatcher
        self._on_success = on_success
        self._on_error = on_error
        self._on_timeout = on_timeout
        self._on_setup_fail = on_setup_fail
        self._on_task_start = on_task_start
        self._on_progress = dispatcher._on_progress
        self._event_listener = dispatcher._event_listener
        self._has_leased_gpus = dispatcher._leased_count is not None

    def handle_event(self, event: tuple[Any, ...]) -> None:
        kind, task_id, worker_id, value, _started, _finished = event
        if self._event_listener is not None:
            self._event_listener(event)
        if self._has_leased_gpus:
            worker_id = self._dispatcher._public_worker_id(worker_id)
        if kind == "done":
            try:
                self._on_success(task_id, value, worker_id)
            except Exception:
                self._handle_callback_error("on_success")
        elif kind == "failed" or kind == "lost":
            if self._on_error is not None:
                self.call(self._on_error, task_id, value, worker_id)
            else:
                log.error("task %s failed: %s", task_id, value, extra={"task_id": task_id, "worker_id": worker_id})
        elif kind == "timed_out":
            if self._on_timeout is not None:
                self.call(self._on_timeout, task_id, value, worker_id)
            else:
                log.error("task %s took longer than %s s", task_id, value, extra={"task_id": task_id, "worker_id": worker_id})
        elif kind == "started":
            if self._on_task_start is not None:
                self.call(self._on_task_start, task_id, worker_id)
        elif kind == "setup_failed":
            gpu_id = self._dispatcher._gpu_id_of(worker_id)
            log.error("GPU %s: worker setup failed: %s", gpu_id, value, extra={"gpu_id": gpu_id, "worker_id": worker_id})
            if self._on_setup_fail is not None:
                self.call(self._on_setup_fail, gpu_id, value)
        elif kind == "cleanup_failed":
            gpu_id = self._dispatcher._gpu_id_of(worker_id)
            log.error("GPU %s: worker cleanup failed: %s", gpu_id, value, extra={"gpu_id": gpu_id, "worker_id": worker_id})
        elif kind == "gone":
            cause, last_words, is_last = value
            if not is_last:
                log.warning("worker %s ended and is replaced: %s", worker_id, cause, extra={"worker_id": worker_id})
        elif kind == "granted":
            gpu_id, _text = value
            self._dispatcher._add_leased_gpu(event[2], gpu_id)
            log.info("GPU %s was leased", gpu_id, extra={"gpu_id": gpu_id, "worker_id": worker_id})
        elif kind == "gpu_lost":
            log.warning("GPU %s was lost; other GPUs run its tasks: %s", worker_id, value[1], extra={"gpu_id": worker_id})
        elif kind == "gpu_note":
            log.info("%s", value[1])
        if self._on_progress is not None:
            self.call(self._on_progress, self._progress_event(event))
        if self._dispatcher._debug and kind in ("failed", "lost", "timed_out", "setup_failed"):
            raise RuntimeError(_failure_message(kind, task_id, worker_id, value))

    def call(self, callback: Callable[..., Any], *arguments: Any) -> None:
        try:
            callback(*arguments)
        except Exception:
            self._handle_callback_error(getattr(callback, "__name__", "a callback"))

    def _handle_callback_error(self, name: str) -> None:
        if self._dispatcher._debug:
            raise
        log.exception("%s raised an exception; the run continues", name)

    def _progress_event(self, event: tuple[Any, ...]) -> ProgressEvent:
        kind, task_id, worker_id, value, started, finished = event
        gpu_id = self._dispatcher._gpu_id_of(worker_id)
        worker_id = self._dispatcher._public_worker_id(worker_id)
        message: Any = None
        if kind == "done":
            kind, message = "success", TaskSuccess(task_id, value, worker_id)
        elif kind in ("failed", "lost"):
            kind, message = "error", TaskError(task_id, value, worker_id)
        elif kind == "timed_out":
            kind, message = "timeout", TaskTimeout(task_id, value, worker_id)
        elif kind == "started":
            message = TaskStarted(task_id, worker_id)
        elif kind == "setup_failed":
            message = SetupFailed(gpu_id if gpu_id is not None else -1, value)
        elif kind == "cleanup_failed":
            message = CleanupFailed(gpu_id if gpu_id is not None else -1, value)
        elif kind == "gone":
            kind = "worker_gone"
        return ProgressEvent(
            kind, task_id, worker_id, gpu_id, started, finished, self._dispatcher.get_stats(), message
        )


def _failure_message(kind: str, task_id: Optional[int], worker_id: Optional[int], value: Any) -> str:
    if kind == "setup_failed":
        return f"debug: setup of worker {worker_id} failed:\n{value}"
    if kind == "timed_out":
        return f"debug: task {task_id} took longer than {value} seconds"
    return f"debug: task {task_id} failed:\n{value}"
