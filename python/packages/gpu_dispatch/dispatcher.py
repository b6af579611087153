"""Dispatcher: distributes tasks to workers and calls callbacks with their results."""

from __future__ import annotations

import os
import threading
from typing import Any, Callable, Iterable, Optional, Sequence, Union

from gpupool import _native
from gpupool._worker_program import WorkerProgram, check_not_loading_main

from gpu_dispatch._callbacks import OnError, OnSuccess, OnTimeout, ProgressEvent, RunCallbacks
from gpu_dispatch._run_options import RunOptions, checked_count, checked_gpu_ids, checked_timeout, visible_gpu_environment
from gpu_dispatch.worker import BaseWorker, start_worker

# Time for an interrupted task to end before its worker is killed.
GRACE_SECS = 5.0


class Dispatcher:
    """Distributes tasks to worker processes, one (or `workers_per_gpu`) for each GPU.

    `gpu_ids` are GPU numbers; `"auto"` leases all free GPUs of this machine's pool (and waits until at least one is free),
    `"auto:2"` leases two. A worker of a leased GPU sees only this GPU. A number that is listed twice gets two workers.

    Arguments after `suppress_worker_output` are keyword-only. `on_progress` gets a `ProgressEvent` for each event. A failed
    task is retried up to `retries` times. The file `joblog` records completed tasks; a later run with the same file skips them.
    With `debug`, the output of workers is shown and the first failure ends the run. With `mask`, each worker sees only its own
    GPU.
    """

    def __init__(
        self,
        worker_cls: type[BaseWorker],
        gpu_ids: Union[Sequence[int], str],
        queue_size: int = 1024,
        suppress_worker_output: bool = False,
        *,
        on_progress: Optional[Callable[[ProgressEvent], Any]] = None,
        retries: int = 0,
        joblog: Optional[str] = None,
        debug: bool = False,
        workers_per_gpu: int = 1,
        mask: Optional[bool] = None,
    ) -> None:
        if not (isinstance(worker_cls, type) and issubclass(worker_cls, BaseWorker)):
            raise TypeError(f"worker_cls must inherit from BaseWorker, got {worker_cls!r}")
        self.worker_cls = worker_cls
        self.gpu_ids, self._leased_count = checked_gpu_ids(gpu_ids)
        self.queue_size = checked_count("queue_size", queue_size, 1)
        self.suppress_worker_output = suppress_worker_output
        self._on_progress = on_progress
        # For `gpu_dispatch.ui`: called with each native event, including the output of workers if `_reports_output` is set.
        self._event_listener: Optional[Callable[[tuple[Any, ...]], None]] = None
        self._reports_output = False
        self._retries = checked_count("retries", retries, 0)
        self._joblog = joblog
        self._debug = debug
        self._workers_per_gpu = checked_count("workers_per_gpu", workers_per_gpu, 1)
        if self._leased_count is not None and mask is False:
            raise ValueError("mask must not be False with gpu_ids='auto': a worker sees only its leased GPU")
        self._mask = mask or self._leased_count is not None
        self._gpu_ids_of_workers: dict[int, int] = {}
        self._run: Optional[_native.Run] = None
        self._last_stats: dict[str, Any] = _empty_stats()
        self._is_running = self._is_shut_down = False
        self._lock = threading.Lock()

    def run(
        self,
        generator: Iterable[Any],
        on_success: OnSuccess,
        on_error: Optional[OnError] = None,
        on_timeout: Optional[OnTimeout] = None,
        on_setup_fail: Optional[Callable[[int, str], Any]] = None,
        on_task_start: Optional[Callable[[int, int], Any]] = None,
        on_exit: Optional[Callable[[], Any]] = None,
        base_seed: int = 42,
        task_timeout: Optional[float] = None,
        total_tasks: Optional[int] = None,
        **setup_kwargs: Any,
    ) -> None:
        """Run all tasks of the generator. Return when all tasks are finished and the workers have exited.

        Callbacks run in this thread; another thread reads the generator, never more than `queue_size` tasks ahead. Exceptions
        of callbacks are logged. An exception of the generator is raised here after its earlier tasks are finished. Additional
        keyword arguments are passed to `setup`.
        """
        check_not_loading_main("a dispatcher")
        task_timeout = checked_timeout(task_timeout)
        callbacks = RunCallbacks(self, on_success, on_error, on_timeout, on_setup_fail, on_task_start)
        with self._lock:
            if self._is_running:
                raise RuntimeError("this dispatcher is already running")
            self._is_running, self._is_shut_down = True, False
        try:
            run = _native.Run(self._run_options(base_seed, task_timeout, setup_kwargs, on_task_start is not None))
            with self._lock:
                self._run = run
                if self._is_shut_down:
                    run.stop()
            self._process_events(run, generator, callbacks)
        finally:
            with self._lock:
                if self._run is not None:
                    self._last_stats = _stats(self._run)
                self._run, self._is_running = None, False
            if on_exit is not None:
                callbacks.call(on_exit)

    def shutdown(self) -> None:
        """End a run early, from a callback or another thread: drop waiting tasks, interrupt running ones, clean up workers."""
        with self._lock:
            self._is_shut_down = True
            if self._run is not None:
                self._run.stop()

    def get_stats(self) -> dict[str, Any]:
        """Return the numbers of tasks that are `pending`, `running`, `completed`, `failed` and `timeouts`, and all workers."""
        with self._lock:
            return _stats(self._run) if self._run is not None else dict(self._last_stats)

    def _process_events(self, run: _native.Run, generator: Iterable[Any], callbacks: RunCallbacks) -> None:
        reader = _GeneratorReader(run, generator)
        reader.start()
        try:
            while True:
                events = run.events()
                if events is None:
                    break
                for event in events:
                    callbacks.handle_event(event)
        except BaseException:
            run.forget()
            run.cancel()
            # End the workers before raising the exception.
            while run.events() is not None:
                pass
            raise
        failure = run.finish()
        if reader.error is not None:
            raise reader.error
        if failure is not None and not self._is_shut_down:
            kind, text = failure
            if kind == "setup":
                raise RuntimeError("All workers failed during setup")
            raise RuntimeError(text)

    def _run_options(
        self, base_seed: int, task_timeout: Optional[float], setup_kwargs: dict[str, Any], tell_started: bool
    ) -> RunOptions:
        self._gpu_ids_of_workers = {worker_id: gpu_ids[0] for worker_id, gpu_ids, _ in self._worker_slots()}
        program = WorkerProgram(start_worker, self.worker_cls, base_seed, self._mask, setup_kwargs, task_timeout=task_timeout)
        return RunOptions(
            program=program.arguments,
            environment={"PYTHONUNBUFFERED": "1"} if self._debug else {},
            settings=program.settings,
            helper=program.helper,
            by_value=program.by_value,
            shares_memory=True,
            places=self._worker_slots(),
            queue_size=self.queue_size,
            task_timeout=task_timeout,
            grace=GRACE_SECS,
            retries=self._retries,
            output=self._output_mode(),
            tell_started=tell_started or self._on_progress is not None,
            joblog=None if self._joblog is None else os.fspath(self._joblog),
            name=f"{self.worker_cls.__module__}.{self.worker_cls.__qualname__}",
            gpus=None if self._leased_count is None else (self._leased_count or None, self._workers_per_gpu),
        )

    def _output_mode(self) -> str:
        if self.suppress_worker_output and not self._debug:
            return "dropped"
        return "told" if self._reports_output else "inherited"

    def _worker_slots(self) -> list[tuple[int, list[int], dict[str, str]]]:
        slots = []
        for position, gpu_id in enumerate(self.gpu_ids):
            environment = visible_gpu_environment(gpu_id) if self._mask else {}
            for nth in range(self._workers_per_gpu):
                worker_id = position * self._workers_per_gpu + nth if self._has_worker_ids() else gpu_id
                slots.append((worker_id, [gpu_id], environment))
        return slots

    def _gpu_id_of(self, worker_id: Optional[int]) -> Optional[int]:
        return None if worker_id is None else self._gpu_ids_of_workers.get(worker_id, worker_id)

    def _has_worker_ids(self) -> bool:
        """Return whether worker ids differ from GPU numbers, because a GPU has several workers."""
        return self._workers_per_gpu > 1 or len(set(self.gpu_ids)) != len(self.gpu_ids)

    def _public_worker_id(self, worker_id: Optional[int]) -> Optional[int]:
        """Return the worker id that callbacks get."""
        return worker_id if self._has_worker_ids() else self._gpu_id_of(worker_id)

    def _add_leased_gpu(self, worker_id: int, gpu_id: int) -> None:
        self._gpu_ids_of_workers[worker_id] = gpu_id
        if gpu_id not in self.gpu_ids:
            self.gpu_ids.append(gpu_id)


class _GeneratorReader(threading.Thread):
    """Thread that reads the generator and adds its tasks to the run."""

    def __init__(self, run: _native.Run, generator: Iterable[Any]) -> None:
        super().__init__(name="gpu_dispatch-feeder", daemon=True)
        self._native_run = run
        self._generator = generator
        self.error: Optional[BaseException] = None

    def run(self) -> None:
        try:
            put = self._native_run.put
            for item in self._generator:
                if not put(item):
                    break
        except BaseException as error:
            self.error = error
        finally:
            self._native_run.close()


def _empty_stats() -> dict[str, Any]:
    return {"pending": 0, "running": 0, "completed": 0, "failed": 0, "timeouts": 0}


def _stats(run: _native.Run) -> dict[str, Any]:
    stats: dict[str, Any] = run.stats()
    return stats
