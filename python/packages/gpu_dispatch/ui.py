"""Dispatcher with a live display of the progress and of each GPU's task.

    RichDispatcher(Doubler, gpu_ids=[0, 1]).run(range(100), on_success=store_result, total_tasks=100)

The display needs `rich` (`pip install 'gpupool[ui]'`). Without a terminal nothing is drawn. With `show_ui=False`, nothing is
drawn and `rich` is not needed.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Iterable, Optional, Sequence, Union

from gpu_dispatch._callbacks import OnError, OnSuccess, OnTimeout
from gpu_dispatch.dispatcher import Dispatcher
from gpu_dispatch.worker import BaseWorker

if TYPE_CHECKING:
    from rich.console import Console

    from gpu_dispatch._progress_display import ProgressDisplay

__all__ = ["RichDispatcher"]

# Status of a worker in `gpu_status`, by its native state.
_STATUS_BY_STATE = {
    "starting": "starting",
    "setting-up": "starting",
    "idle": "idle",
    "busy": "busy",
    "ending": "idle",
    "gone": "idle",
}
# A GPU with several workers shows the first of these statuses that a worker has.
_STATUS_PRECEDENCE = ("busy", "idle", "starting", "failed")


class RichDispatcher:
    """A `Dispatcher` whose `run` draws the progress `refresh_rate` times a second and returns a summary.

    `options` are the keyword-only arguments of `Dispatcher`, such as `retries` and `workers_per_gpu`.
    """

    def __init__(
        self,
        worker_cls: type[BaseWorker],
        gpu_ids: Union[Sequence[int], str],
        queue_size: int = 1024,
        show_ui: bool = True,
        refresh_rate: float = 2.0,
        console: Optional[Console] = None,
        suppress_worker_output: bool = True,
        **options: Any,
    ) -> None:
        if isinstance(refresh_rate, bool) or not isinstance(refresh_rate, (int, float)) or not 0 < refresh_rate <= 60:
            raise ValueError(f"refresh_rate must be a number of redraws per second, above 0 and up to 60, got {refresh_rate!r}")
        self._dispatcher = Dispatcher(worker_cls, gpu_ids, queue_size, suppress_worker_output, **options)
        self.show_ui = show_ui
        self.refresh_rate = float(refresh_rate)
        self.console = _default_console() if show_ui and console is None else console
        self._dispatcher._event_listener = self._handle_event
        self._display: Optional[ProgressDisplay] = None
        self._expected_total: Optional[int] = None
        self._start_time: Optional[float] = None
        self._end_time: Optional[float] = None
        self._setup_failures = 0
        self._failed_workers: set[int] = set()
        self._last_durations: dict[int, float] = {}

    def run(
        self,
        generator: Iterable[Any],
        on_success: Optional[OnSuccess] = None,
        on_error: Optional[OnError] = None,
        on_timeout: Optional[OnTimeout] = None,
        on_setup_fail: Optional[Callable[[int, str], Any]] = None,
        on_task_start: Optional[Callable[[int, int], Any]] = None,
        on_exit: Optional[Callable[[], Any]] = None,
        base_seed: int = 42,
        task_timeout: Optional[float] = None,
        total_tasks: Optional[int] = None,
        **setup_kwargs: Any,
    ) -> dict[str, Any]:
        """Do the same as `Dispatcher.run` and return a summary.

        The summary has `total` (finished tasks), `completed`, `failed`, `timeouts`, `setup_failures`, `start_time` and
        `end_time` (Unix times), `expected_total` (the argument, else the length of the generator) and `gpu_status`.
        """
        self._reset(total_tasks if total_tasks is not None else _length(generator))
        with self._open_display():
            try:
                self._dispatcher.run(
                    generator,
                    on_success if on_success is not None else _ignore_result,
                    on_error,
                    on_timeout,
                    on_setup_fail,
                    on_task_start,
                    on_exit,
                    base_seed=base_seed,
                    task_timeout=task_timeout,
                    total_tasks=total_tasks,
                    **setup_kwargs,
                )
            finally:
                self._end_time = time.time()
        return self._result(self._dispatcher.get_stats())

    def shutdown(self) -> None:
        """End a run early, from a callback or another thread, as `Dispatcher.shutdown` does."""
        self._dispatcher.shutdown()

    def get_stats(self) -> dict[str, Any]:
        """Return the current summary of the run, with the numbers of `pending` and `running` tasks."""
        stats = self._dispatcher.get_stats()
        return {"pending": stats["pending"], "running": stats["running"], **self._result(stats)}

    def _reset(self, expected: Optional[int]) -> None:
        self._expected_total, self._start_time, self._end_time = expected, time.time(), None
        self._setup_failures = 0
        self._failed_workers.clear()
        self._last_durations.clear()

    def _open_display(self) -> ContextManager[Any]:
        self._display, self._dispatcher._reports_output = None, False
        if not self.show_ui:
            return nullcontext()
        from gpu_dispatch import _progress_display

        console: Any = self.console
        if not _progress_display.can_draw(console):
            return nullcontext()
        # Direct output of workers would disturb the display; the run reports the output instead, and `_handle_event` writes it.
        self._dispatcher._reports_output = True
        self._display = _progress_display.ProgressDisplay(console, self.refresh_rate, self.get_stats)
        return self._display

    def _handle_event(self, event: tuple[Any, ...]) -> None:
        kind, _task_id, worker_id, value, started, finished = event
        if kind == "setup_failed":
            self._setup_failures += 1
            self._failed_workers.add(worker_id)
        elif kind == "ready":
            self._failed_workers.discard(worker_id)
        elif kind == "wrote":
            if self._display is not None:
                self._display.write(value)
        elif started is not None and finished is not None and worker_id is not None:
            self._last_durations[worker_id] = finished - started

    def _result(self, stats: dict[str, Any]) -> dict[str, Any]:
        completed, failed, timeouts = stats["completed"], stats["failed"], stats["timeouts"]
        return {
            "total": completed + failed + timeouts,
            "completed": completed,
            "failed": failed,
            "timeouts": timeouts,
            "setup_failures": self._setup_failures,
            "start_time": self._start_time,
            "end_time": self._end_time,
            "expected_total": self._expected_total,
            "gpu_status": self._gpu_status(stats.get("workers", ())),
        }

    def _gpu_status(self, workers: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
        gpus: dict[int, dict[str, Any]] = {}
        for worker in workers:
            gpu_id = worker["gpu_ids"][0]
            status = self._worker_status(worker)
            gpu_status = gpus.setdefault(gpu_id, status)
            if gpu_status is not status:
                _merge_worker_status(gpu_status, status)
        return gpus

    def _worker_status(self, worker: dict[str, Any]) -> dict[str, Any]:
        state = worker["state"]
        has_failed = worker["id"] in self._failed_workers and state == "gone"
        return {
            "status": "failed" if has_failed else _STATUS_BY_STATE.get(state, state),
            "current_task": worker["task"],
            "task_start_time": worker["task_since"],
            "last_duration": self._last_durations.get(worker["id"]),
            "completed": worker["completed"],
            "failed": worker["failed"],
            "timeouts": worker["timeouts"],
        }


def _merge_worker_status(gpu: dict[str, Any], other: dict[str, Any]) -> None:
    """Add another worker of the same GPU to its status; the current task is the one that has run longest."""
    for count in ("completed", "failed", "timeouts"):
        gpu[count] += other[count]
    gpu["status"] = min(gpu["status"], other["status"], key=_STATUS_PRECEDENCE.index)
    since, other_since = gpu["task_start_time"], other["task_start_time"]
    if other_since is not None and (since is None or other_since < since):
        gpu["current_task"], gpu["task_start_time"] = other["current_task"], other_since
    if gpu["last_duration"] is None:
        gpu["last_duration"] = other["last_duration"]


def _length(generator: Any) -> Optional[int]:
    try:
        return len(generator)
    except TypeError:
        return None


def _default_console() -> Any:
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError(
            "RichDispatcher needs the package `rich`, which is not installed: "
            "run pip install 'gpupool[ui]', or pass show_ui=False"
        ) from error
    return Console()


def _ignore_result(*_arguments: Any) -> None:
    pass
