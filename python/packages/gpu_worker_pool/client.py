"""`GPUWorkerPoolClient`: asks one server or many for GPUs, and keeps what it was granted until it is released."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Awaitable, Callable, Dict, List, Mapping, Optional, Tuple, Type, TypeVar, Union, overload

from gpupool import _exit, _native, _settings

from . import _status
from ._relay import Relay, Update, in_running_loop, log_assignment
from .exceptions import (
    CircuitBreakerOpenError,
    ClientStateError,
    ConfigurationError,
    InvalidAssignmentError,
    ServiceUnavailableError,
    StaleAssignmentError,
    WorkerTimeoutError,
)
from .models import (
    EndpointInfo,
    GlobalGPUAssignment,
    GlobalGPUInfo,
    GPUAssignment,
    GPUInfo,
    GPUStats,
    MultiEndpointPoolStatus,
    PoolStatus,
    WorkerInfo,
)

__all__ = [
    "CircuitBreakerOpenError",
    "ConfigurationError",
    "EndpointInfo",
    "GPUAssignment",
    "GPUContextManager",
    "GPUInfo",
    "GPUStats",
    "GPUWorkerPoolClient",
    "GlobalGPUAssignment",
    "GlobalGPUInfo",
    "MultiEndpointPoolStatus",
    "PoolStatus",
    "ServiceUnavailableError",
    "StaleAssignmentError",
    "WorkerInfo",
    "WorkerTimeoutError",
    "gpu_worker_pool_client",
]

T = TypeVar("T")

#: Told from a value that somebody gave by being this very object: where nobody did, `GPU_ENDPOINT_TIMEOUT` counts.
_USUAL_REQUEST_TIMEOUT = float("30.0")


class GPUWorkerPoolClient:
    """Asks one server or many for GPUs.

    Use it with `async with`, or call `start` and `stop`. What is not given comes from the environment. An assignment is held,
    and renewed in the background, until it is released or the client is stopped, collected or its process ends. One client
    may be used from several event loops and threads; a forked child makes its own.
    """

    def __init__(
        self,
        service_endpoint: Optional[str] = None,
        service_endpoints: Optional[str] = None,
        load_balancing_strategy: Optional[str] = None,
        memory_threshold: Optional[float] = None,
        utilization_threshold: Optional[float] = None,
        polling_interval: Optional[float] = None,
        worker_timeout: float = 300.0,
        request_timeout: float = _USUAL_REQUEST_TIMEOUT,
        *,
        token: Optional[str] = None,
        ca_file: Union[str, os.PathLike[str], None] = None,
        proxy: Optional[str] = None,
        stale_age: Optional[float] = None,
        max_retries: Optional[int] = None,
        health_check_interval: Optional[float] = None,
    ) -> None:
        is_usual = request_timeout is _USUAL_REQUEST_TIMEOUT
        self._worker_timeout = 300.0 if worker_timeout is None else worker_timeout
        self._native = _native.Client(
            _settings.settings(
                service_endpoint=service_endpoint,
                service_endpoints=service_endpoints,
                load_balancing_strategy=load_balancing_strategy,
                memory_threshold=memory_threshold,
                utilization_threshold=utilization_threshold,
                polling_interval=polling_interval,
                worker_timeout=_settings.seconds("worker_timeout", self._worker_timeout),
                request_timeout=None if is_usual else request_timeout,
                usual_request_timeout=_USUAL_REQUEST_TIMEOUT,
                token=token,
                ca_file=ca_file,
                proxy=proxy,
                stale_age=stale_age,
                max_retries=max_retries,
                health_check_interval=health_check_interval,
            )
        )
        self._is_multi = self._native.is_multi_endpoint
        self._held: Dict[str, _native.Lease] = {}
        self._mark = os.urandom(8).hex()
        self._relay = Relay()
        self._is_followed = False

    async def start(self) -> None:
        """Looks for the servers and begins to watch them; comes back also where none answers yet."""
        if not self._is_followed:
            self._native.follow(self._relay)
            self._is_followed = True
        _exit.stop_at_exit(self._native)
        try:
            await self._native.start()
        except ClientStateError:
            raise
        except BaseException:
            self._native.stop_soon()
            raise

    async def stop(self) -> None:
        """Gives back everything that is held. The client can be started again."""
        held, self._held = self._held, {}
        try:
            await self._native.stop()
        finally:
            self._relay.held.clear()
            for lease in held.values():
                _log_release(lease)

    async def request_gpu(
        self,
        timeout: Optional[float] = None,
        *,
        fraction: Optional[float] = None,
        memory_mib: Optional[int] = None,
        gpus: Optional[int] = None,
        priority: Optional[int] = None,
        sharing: Optional[bool] = None,
        isolation: Optional[str] = None,
        strategy: Optional[str] = None,
        select: Optional[Mapping[str, Any]] = None,
        labels: Optional[Mapping[str, str]] = None,
        worker_id: Optional[str] = None,
        ttl: Optional[float] = None,
        max_duration: Optional[float] = None,
        wait: bool = True,
    ) -> GPUAssignment:
        """Waits for a GPU, `timeout` seconds at most (`worker_timeout` unless given), and holds it: a whole one, unless a
        part is asked for. With several servers it is a `GlobalGPUAssignment`.
        """
        wish = _settings.wish(
            timeout,
            {
                "fraction": fraction,
                "memory_mib": memory_mib,
                "gpus": gpus,
                "priority": priority,
                "sharing": sharing,
                "isolation": isolation,
                "strategy": strategy,
                "select": select,
                "labels": labels,
                "worker_id": worker_id,
                "ttl_secs": ttl,
                "max_duration_secs": max_duration,
                "queue": None if wait else False,
            },
        )
        if worker_id is not None and worker_id in self._held:
            raise ConfigurationError(f"worker_id {worker_id!r} holds a GPU already: release it, or choose another name")
        try:
            lease = await self._native.request(wish)
        except WorkerTimeoutError as error:
            waited = self._worker_timeout if timeout is None else timeout
            error.args = (f"Worker {error.worker_id} request timed out after {waited} seconds",)
            raise
        return self._assigned(lease)

    def _assigned(self, lease: _native.Lease) -> GPUAssignment:
        gpu_ids, assigned_at = lease.gpu_ids, _status.moment(lease.assigned_at)
        gpu_id = gpu_ids[0] if gpu_ids else 0
        assignment = GPUAssignment(gpu_id, lease.worker_id, assigned_at)
        if self._is_multi:
            endpoint_id = lease.endpoint_id
            global_id = f"{endpoint_id}:{gpu_id}"
            assignment = GlobalGPUAssignment(global_id, endpoint_id, gpu_id, lease.worker_id, assigned_at)
        # No field of the data class: it only says which grant of this client it is.
        assignment._grant = self._grant_of(lease)  # type: ignore[attr-defined]
        self._held[lease.worker_id] = lease
        self._relay.held[lease.worker_id] = (gpu_ids, lease.id)
        log_assignment("GPU %s of %s assigned to worker %s", lease.worker_id, lease.endpoint_id, gpu_ids, lease.id)
        return assignment

    async def release_gpu(self, assignment: GPUAssignment) -> None:
        """Gives a GPU back to the server it came from. Twice is harmless; `ValueError` where it was never granted, and
        `StaleAssignmentError` where it had been lost.
        """
        if not self._native.is_started and self._native.is_ours:
            raise ClientStateError("Client must be started before releasing GPU")
        lease = self._lease_of(assignment)
        if lease is None:
            return
        del self._held[lease.worker_id]
        try:
            await lease.release()
        finally:
            self._relay.held.pop(lease.worker_id, None)
            _log_release(lease)

    def check_assignment(self, assignment: GPUAssignment) -> None:
        """Raises `StaleAssignmentError` where the GPU is not held any more."""
        lease = self._lease_of(assignment)
        if lease is None:
            raise StaleAssignmentError(f"the assignment of worker {assignment.worker_id} was released")
        lease.check()

    def assignment_env(self, assignment: GPUAssignment) -> Dict[str, Optional[str]]:
        """What to set in the environment of a program that uses the GPU; `None` means that the variable must not be set."""
        lease = self._lease_of(assignment)
        return {} if lease is None else dict(lease.env)

    def _lease_of(self, assignment: GPUAssignment) -> Optional[_native.Lease]:
        """What is held under an assignment; `None` where it was released."""
        if not isinstance(assignment, GPUAssignment):
            raise InvalidAssignmentError(
                f"assignment must be what request_gpu() returned, got {assignment!r} ({type(assignment).__name__})"
            )
        lease = self._held.get(assignment.worker_id)
        grant = getattr(assignment, "_grant", None)
        if grant is not None and grant[0] == self._mark:
            # The same worker may hold another one by now.
            return lease if lease is not None and grant == self._grant_of(lease) else None
        # Put together by the program from what it knows of one.
        if grant is None and lease is not None and assignment.gpu_id in (lease.gpu_ids or [0]):
            if getattr(assignment, "endpoint_id", lease.endpoint_id) == lease.endpoint_id:
                return lease
        raise InvalidAssignmentError(f"{assignment!r} was never granted by this client")

    def _grant_of(self, lease: _native.Lease) -> Tuple[str, str, int]:
        return (self._mark, lease.endpoint_id, lease.id)

    def get_pool_status(self) -> PoolStatus:
        """How the pool stands, from what is known; a `MultiEndpointPoolStatus` with several servers."""
        return _status.pool_status(self._native.pool_status(), self._is_multi)

    def get_detailed_metrics(self) -> Dict[str, Any]:
        """Everything that is counted."""
        return _status.metrics(self._native.detailed_metrics(), self._native.pool_status(), self._is_multi)

    def get_endpoints_info(self) -> Optional[List[Dict[str, Any]]]:
        """Each server; `None` where there is one only, or the client is not started."""
        if not self._is_multi or not self._native.is_started:
            return None
        return [_status.endpoint(info) for info in self._native.endpoints_info()]

    def get_error_recovery_status(self) -> Dict[str, Any]:
        """How servers fail and come back."""
        return self._native.error_recovery_status()

    def print_error_recovery_summary(self) -> None:
        """Prints the same as a short report."""
        print(self._native.error_recovery_summary(), end="")

    def get_health(self) -> Dict[str, Any]:
        """Whether all is well: `status`, and what each server says of itself."""
        return self._native.health()

    async def trigger_endpoint_recovery(self, endpoint_id: str) -> bool:
        """Looks at a server now, whatever is known of it; `False` where there is no such server."""
        self._check_is_multi("triggering endpoint recovery")
        if not isinstance(endpoint_id, str):
            raise ConfigurationError(f"endpoint_id must be a str, got {endpoint_id!r} ({type(endpoint_id).__name__})")
        return await self._native.trigger_endpoint_recovery(endpoint_id)

    @overload
    async def queue_request_for_retry(self, request_func: Callable[[], Awaitable[T]]) -> T: ...

    @overload
    async def queue_request_for_retry(self, request_func: Callable[[], T]) -> T: ...

    async def queue_request_for_retry(self, request_func: Callable[[], Any]) -> Any:
        """Calls a function now where any server can be asked, otherwise as soon as one can, and gives back what it does."""
        if not callable(request_func):
            raise ConfigurationError(
                f"request_func must be a function to call, such as lambda: client.request_gpu(), got {request_func!r}"
            )
        self._check_is_multi("queueing a request for retry")
        await self._native.until_healthy()
        result = request_func()
        return await result if hasattr(result, "__await__") else result

    def _check_is_multi(self, doing: str) -> None:
        if not self._native.is_started and self._native.is_ours:
            raise ClientStateError(f"Client must be started before {doing}")
        if not self._is_multi:
            raise ClientStateError(f"{doing} needs several endpoints: give service_endpoints")

    def is_multi_endpoint_mode(self) -> bool:
        """Whether it was told of several servers."""
        return self._is_multi

    def subscribe(self, callback: Callable[[Update], object]) -> Callable[[], None]:
        """Calls a function with everything that happens, as a dict with its `kind`: `statistics`, `endpoint_up`,
        `endpoint_down`, `blocked`, `unblocked`, `assigned`, `released`, `lost` or `missed`.

        It is called in the event loop that runs now, or where none does in a thread of the client. Gives back a function
        that ends it.
        """
        if not callable(callback):
            raise ConfigurationError(f"callback must be a function to call, got {callback!r}")
        called = in_running_loop(callback)
        self._relay.add(called)
        self._native.set_wants_all(True)

        def unsubscribe() -> None:
            self._native.set_wants_all(self._relay.remove(called))

        return unsubscribe

    async def __aenter__(self) -> GPUWorkerPoolClient:
        await self.start()
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        # A forked child that leaves the block leaves what is its parent's alone.
        if self._native.is_ours:
            await self.stop()


def _log_release(lease: _native.Lease) -> None:
    log_assignment("GPU %s of %s released by worker %s", lease.worker_id, lease.endpoint_id, lease.gpu_ids, lease.id)


class GPUContextManager:
    """`async with` this, and a GPU of the client is held until the block is left: its number, or with several servers
    `endpoint_id:gpu_id`.
    """

    def __init__(self, client: GPUWorkerPoolClient, timeout: Optional[float] = None, **wish: Any) -> None:
        if not hasattr(client, "request_gpu"):
            raise ConfigurationError(f"client must be a GPUWorkerPoolClient, got {client!r} ({type(client).__name__})")
        self.client = client
        self.timeout = timeout
        #: What is held; `None` outside of the block.
        self.assignment: Optional[GPUAssignment] = None
        self._wish = wish
        self._entered_by = 0

    async def __aenter__(self) -> Union[int, str]:
        self.assignment = await self.client.request_gpu(self.timeout, **self._wish)
        self._entered_by = os.getpid()
        if isinstance(self.assignment, GlobalGPUAssignment):
            return self.assignment.global_gpu_id
        return self.assignment.gpu_id

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        assignment, self.assignment = self.assignment, None
        if assignment is None or self._entered_by != os.getpid():
            return
        try:
            await self.client.release_gpu(assignment)
        except ClientStateError:
            # A client that was stopped in the block has given it back.
            pass
        except StaleAssignmentError:
            # What went wrong first says more.
            if error is None:
                raise


class gpu_worker_pool_client:  # noqa: N801 - called as a function
    """`async with gpu_worker_pool_client(...) as client`: a client that is started, and stopped when the block is left."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._client = GPUWorkerPoolClient(*arguments, **settings)

    async def __aenter__(self) -> GPUWorkerPoolClient:
        await self._client.start()
        return self._client

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        await self._client.__aexit__(kind, error, trace)
