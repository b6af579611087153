"""The dispatcher: tasks in, callbacks out."""

from __future__ import annotations

import os
import threading
from typing import Any, Callable, Iterable, Optional, Sequence, Union

from gpupool import _native
from gpupool._program import Program, check_not_imported

from gpu_dispatch._callbacks import Callbacks, OnError, OnSuccess, OnTimeout, ProgressEvent
from gpu_dispatch._wish import Wish, checked_count, checked_gpu_ids, checked_timeout, mask_of
from gpu_dispatch.worker import BaseWorker, start

# How long a task that was interrupted may take before its worker is killed.
GRACE_SECS = 5.0


class Dispatcher:
    """Feeds tasks to workers, one process (or `workers_per_gpu`) for each GPU.

    `gpu_ids` are numbers of GPUs; `"auto"` leases what is free in the pool of this machine (at least one, waiting for it), and
    `"auto:2"` two: each worker then sees only its own GPU. A number that stands there twice has two workers.

    The arguments after `suppress_worker_output` are given by name. `on_progress` gets a `ProgressEvent` for whatever happens.
    A task that failed is tried `retries` more times. What is done is noted in the file `joblog`; a run with the same file does
    not do it again. With `debug`, the output of workers is shown and the first thing that fails ends the run. With `mask`,
    each worker sees only its own GPU, as the only one.
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
        self.gpu_ids, self._leased = checked_gpu_ids(gpu_ids)
        self.queue_size = checked_count("queue_size", queue_size, 1)
        self.suppress_worker_output = suppress_worker_output
        self._on_progress = on_progress
        # For `gpu_dispatch.ui`: gets each event as it comes, those of what workers write included if it is told.
        self._on_event: Optional[Callable[[tuple[Any, ...]], None]] = None
        self._tells_output = False
        self._retries = checked_count("retries", retries, 0)
        self._joblog = joblog
        self._debug = debug
        self._workers_per_gpu = checked_count("workers_per_gpu", workers_per_gpu, 1)
        if self._leased is not None and mask is False:
            raise ValueError("mask must not be False with gpu_ids='auto': a worker sees the GPU it has leased, and no other")
        self._mask = mask or self._leased is not None
        self._gpu_ids_of_workers: dict[int, int] = {}
        self._run: Optional[_native.Run] = None
        self._last_stats: dict[str, Any] = _no_stats()
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
        """Does all tasks of the generator, and comes back when all are over and the workers gone.

        Callbacks run in this thread; the generator is read in another one, never more than `queue_size` ahead. What a callback
        raises is logged; what the generator raises comes out of here, when what it gave before is over. Other keywords go to
        `setup`.
        """
        check_not_imported("a dispatcher")
        task_timeout = checked_timeout(task_timeout)
        callbacks = Callbacks(self, on_success, on_error, on_timeout, on_setup_fail, on_task_start)
        with self._lock:
            if self._is_running:
                raise RuntimeError("this dispatcher runs already")
            self._is_running, self._is_shut_down = True, False
        try:
            run = _native.Run(self._wish(base_seed, task_timeout, setup_kwargs, on_task_start is not None))
            with self._lock:
                self._run = run
                if self._is_shut_down:
                    run.stop()
            self._follow(run, generator, callbacks)
        finally:
            with self._lock:
                if self._run is not None:
                    self._last_stats = _stats(self._run)
                self._run, self._is_running = None, False
            if on_exit is not None:
                callbacks.call(on_exit)

    def shutdown(self) -> None:
        """Ends a run before its time, from a callback or another thread: what is not done is given up, what workers are at is
        interrupted, and they clean up.
        """
        with self._lock:
            self._is_shut_down = True
            if self._run is not None:
                self._run.stop()

    def get_stats(self) -> dict[str, Any]:
        """How many tasks are `pending`, `running`, `completed`, `failed`, `timeouts`, and what each worker does."""
        with self._lock:
            return _stats(self._run) if self._run is not None else dict(self._last_stats)

    def _follow(self, run: _native.Run, generator: Iterable[Any], callbacks: Callbacks) -> None:
        feeder = _Feeder(run, generator)
        feeder.start()
        try:
            while True:
                events = run.events()
                if events is None:
                    break
                for event in events:
                    callbacks.on(event)
        except BaseException:
            run.forget()
            run.cancel()
            # The workers are ended before anybody hears of it.
            while run.events() is not None:
                pass
            raise
        failure = run.finish()
        if feeder.error is not None:
            raise feeder.error
        if failure is not None and not self._is_shut_down:
            kind, text = failure
            if kind == "setup":
                raise RuntimeError("All workers failed during setup")
            raise RuntimeError(text)

    def _wish(
        self, base_seed: int, task_timeout: Optional[float], setup_kwargs: dict[str, Any], tell_started: bool
    ) -> Wish:
        self._gpu_ids_of_workers = {worker_id: gpu_ids[0] for worker_id, gpu_ids, _ in self._places()}
        program = Program(start, self.worker_cls, base_seed, self._mask, setup_kwargs, task_timeout=task_timeout)
        return Wish(
            program=program.arguments,
            environment={"PYTHONUNBUFFERED": "1"} if self._debug else {},
            settings=program.settings,
            helper=program.helper,
            by_value=program.by_value,
            shares_memory=True,
            places=self._places(),
            queue_size=self.queue_size,
            task_timeout=task_timeout,
            grace=GRACE_SECS,
            retries=self._retries,
            output=self._output(),
            tell_started=tell_started or self._on_progress is not None,
            joblog=None if self._joblog is None else os.fspath(self._joblog),
            name=f"{self.worker_cls.__module__}.{self.worker_cls.__qualname__}",
            gpus=None if self._leased is None else (self._leased or None, self._workers_per_gpu),
        )

    def _output(self) -> str:
        if self.suppress_worker_output and not self._debug:
            return "dropped"
        return "told" if self._tells_output else "inherited"

    def _places(self) -> list[tuple[int, list[int], dict[str, str]]]:
        places = []
        for at, gpu_id in enumerate(self.gpu_ids):
            environment = mask_of(gpu_id) if self._mask else {}
            for nth in range(self._workers_per_gpu):
                worker_id = at * self._workers_per_gpu + nth if self._has_own_ids() else gpu_id
                places.append((worker_id, [gpu_id], environment))
        return places

    def _gpu_of(self, worker_id: Optional[int]) -> Optional[int]:
        return None if worker_id is None else self._gpu_ids_of_workers.get(worker_id, worker_id)

    def _has_own_ids(self) -> bool:
        """Whether workers are not called by their GPUs: one of these has several, by `workers_per_gpu` or named twice."""
        return self._workers_per_gpu > 1 or len(set(self.gpu_ids)) != len(self.gpu_ids)

    def _named(self, worker_id: Optional[int]) -> Optional[int]:
        """What callbacks call a worker."""
        return worker_id if self._has_own_ids() else self._gpu_of(worker_id)

    def _granted(self, worker_id: int, gpu_id: int) -> None:
        self._gpu_ids_of_workers[worker_id] = gpu_id
        if gpu_id not in self.gpu_ids:
            self.gpu_ids.append(gpu_id)


class _Feeder(threading.Thread):
    """Reads the generator."""

    def __init__(self, run: _native.Run, generator: Iterable[Any]) -> None:
        super().__init__(name="gpu_dispatch-feeder", daemon=True)
        self._to = run
        self._generator = generator
        self.error: Optional[BaseException] = None

    def run(self) -> None:
        try:
            put = self._to.put
            for item in self._generator:
                if not put(item):
                    break
        except BaseException as error:
            self.error = error
        finally:
            self._to.close()


def _no_stats() -> dict[str, Any]:
    return {"pending": 0, "running": 0, "completed": 0, "failed": 0, "timeouts": 0}


def _stats(run: _native.Run) -> dict[str, Any]:
    stats: dict[str, Any] = run.stats()
    return stats
