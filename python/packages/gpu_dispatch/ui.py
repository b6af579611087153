"""A dispatcher that shows what it does: each GPU with its task, and how far all is.

    RichDispatcher(Doubler, gpu_ids=[0, 1]).run(range(100), on_success=keep, total_tasks=100)

`rich` draws it (`pip install 'gpupool[ui]'`). Where there is no terminal, or `show_ui` is false, nothing is written and `rich`
is not needed.
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

    from gpu_dispatch._screen import Screen

__all__ = ["RichDispatcher"]

# How a GPU's worker stands, in the words of `gpu_status`.
_STATUS = {
    "starting": "starting",
    "setting-up": "starting",
    "idle": "idle",
    "busy": "busy",
    "ending": "idle",
    "gone": "idle",
}
# Of several workers on a GPU, the one that does most says how it stands.
_LIVELIEST = ("busy", "idle", "starting", "failed")


class RichDispatcher:
    """A `Dispatcher` whose `run` draws its progress `refresh_rate` times a second, and returns what came of it.

    `options` are those that `Dispatcher` takes by name: `retries`, `workers_per_gpu` and so on.
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
            raise ValueError(f"refresh_rate must be a number of times a second, above 0 and up to 60, got {refresh_rate!r}")
        self._dispatcher = Dispatcher(worker_cls, gpu_ids, queue_size, suppress_worker_output, **options)
        self.show_ui = show_ui
        self.refresh_rate = float(refresh_rate)
        self.console = _default_console() if show_ui and console is None else console
        self._dispatcher._on_event = self._note
        self._screen: Optional[Screen] = None
        self._expected: Optional[int] = None
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
        """Does what `Dispatcher.run` does, and returns what came of it.

        That is `total` (tasks that are over), `completed`, `failed`, `timeouts`, `setup_failures`, `start_time` and `end_time`
        (seconds since 1970), `expected_total` (as given, or as the generator's length says) and `gpu_status`.
        """
        self._begin(total_tasks if total_tasks is not None else _length(generator))
        with self._display():
            try:
                self._dispatcher.run(
                    generator,
                    on_success if on_success is not None else _nothing,
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
        """Ends a run before its time, from a callback or another thread: what is not done is given up."""
        self._dispatcher.shutdown()

    def get_stats(self) -> dict[str, Any]:
        """What `run` would return now, and how many tasks are `pending` and `running`."""
        stats = self._dispatcher.get_stats()
        return {"pending": stats["pending"], "running": stats["running"], **self._result(stats)}

    def _begin(self, expected: Optional[int]) -> None:
        self._expected, self._start_time, self._end_time = expected, time.time(), None
        self._setup_failures = 0
        self._failed_workers.clear()
        self._last_durations.clear()

    def _display(self) -> ContextManager[Any]:
        self._screen, self._dispatcher._tells_output = None, False
        if not self.show_ui:
            return nullcontext()
        from gpu_dispatch import _screen

        console: Any = self.console
        if not _screen.can_draw(console):
            return nullcontext()
        # What workers write would go through the picture; told to us, it is written above it.
        self._dispatcher._tells_output = True
        self._screen = _screen.Screen(console, self.refresh_rate, self.get_stats)
        return self._screen

    def _note(self, event: tuple[Any, ...]) -> None:
        kind, _task_id, worker_id, value, started, finished = event
        if kind == "setup_failed":
            self._setup_failures += 1
            self._failed_workers.add(worker_id)
        elif kind == "ready":
            self._failed_workers.discard(worker_id)
        elif kind == "wrote":
            if self._screen is not None:
                self._screen.write(value)
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
            "expected_total": self._expected,
            "gpu_status": self._gpu_status(stats.get("workers", ())),
        }

    def _gpu_status(self, workers: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
        gpus: dict[int, dict[str, Any]] = {}
        for worker in workers:
            gpu_id = worker["gpu_ids"][0]
            one = self._status_of(worker)
            known = gpus.setdefault(gpu_id, one)
            if known is not one:
                _join(known, one)
        return gpus

    def _status_of(self, worker: dict[str, Any]) -> dict[str, Any]:
        state = worker["state"]
        has_failed = worker["id"] in self._failed_workers and state == "gone"
        return {
            "status": "failed" if has_failed else _STATUS.get(state, state),
            "current_task": worker["task"],
            "task_start_time": worker["task_since"],
            "last_duration": self._last_durations.get(worker["id"]),
            "completed": worker["completed"],
            "failed": worker["failed"],
            "timeouts": worker["timeouts"],
        }


def _join(gpu: dict[str, Any], other: dict[str, Any]) -> None:
    """Adds another worker of the same GPU: the task shown is the one that runs longest."""
    for count in ("completed", "failed", "timeouts"):
        gpu[count] += other[count]
    gpu["status"] = min(gpu["status"], other["status"], key=_LIVELIEST.index)
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
            "RichDispatcher draws with the package `rich`, which is not installed: "
            "pip install 'gpupool[ui]', or say show_ui=False"
        ) from error
    return Console()


def _nothing(*_arguments: Any) -> None:
    pass
