"""`GPUWorkerPoolClient`: requests GPUs from one or several servers and keeps the assignments until their release."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Awaitable, Callable, Dict, List, Mapping, Optional, Tuple, Type, TypeVar, Union, overload

from gpupool import _client_arguments, _exit_cleanup, _native

from . import _conversions
from ._updates import Update, UpdatePublisher, call_in_running_loop, log_assignment
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

#: The client compares an argument with this object by identity: without an argument, `GPU_ENDPOINT_TIMEOUT` applies.
_DEFAULT_REQUEST_TIMEOUT = float("30.0")


class GPUWorkerPoolClient:
    """Client that requests GPUs from one or several servers.

    Use it with `async with`, or call `start` and `stop`. The environment provides missing arguments. Assignments are renewed
    in the background until they are released, the client is stopped or garbage-collected, or the process ends. Several event
    loops and threads can share a client; a forked child must create its own.
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
        request_timeout: float = _DEFAULT_REQUEST_TIMEOUT,
        *,
        token: Optional[str] = None,
        ca_file: Union[str, os.PathLike[str], None] = None,
        proxy: Optional[str] = None,
        stale_age: Optional[float] = None,
        max_retries: Optional[int] = None,
        health_check_interval: Optional[float] = None,
    ) -> None:
        is_default = request_timeout is _DEFAULT_REQUEST_TIMEOUT
        self._worker_timeout = 300.0 if worker_timeout is None else worker_timeout
        self._native = _native.Client(
            _client_arguments.build_client_settings(
                service_endpoint=service_endpoint,
                service_endpoints=service_endpoints,
                load_balancing_strategy=load_balancing_strategy,
                memory_threshold=memory_threshold,
                utilization_threshold=utilization_threshold,
                polling_interval=polling_interval,
                worker_timeout=_client_arguments.checked_seconds("worker_timeout", self._worker_timeout),
                request_timeout=None if is_default else request_timeout,
                usual_request_timeout=_DEFAULT_REQUEST_TIMEOUT,
                token=token,
                ca_file=ca_file,
                proxy=proxy,
                stale_age=stale_age,
                max_retries=max_retries,
                health_check_interval=health_check_interval,
            )
        )
        self._is_multi = self._native.is_multi_endpoint
        self._leases: Dict[str, _native.Lease] = {}
        self._client_id = os.urandom(8).hex()
        self._updates = UpdatePublisher()
        self._is_observed = False

    async def start(self) -> None:
        """Connect to the servers and start to poll them. Succeed even if no server answers yet."""
        if not self._is_observed:
            self._native.follow(self._updates)
            self._is_observed = True
        _exit_cleanup.stop_at_exit(self._native)
        try:
            await self._native.start()
        except ClientStateError:
            raise
        except BaseException:
            self._native.stop_soon()
            raise

    async def stop(self) -> None:
        """Release all assignments. The client can be started again."""
        leases, self._leases = self._leases, {}
        try:
            await self._native.stop()
        finally:
            self._updates.assigned_gpus.clear()
            for lease in leases.values():
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
        """Wait for a GPU for at most `timeout` seconds (default: `worker_timeout`) and return its assignment.

        It is a whole GPU unless the arguments request a part. With several servers, the result is a `GlobalGPUAssignment`.
        """
        request = _client_arguments.build_request(
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
        if worker_id is not None and worker_id in self._leases:
            raise ConfigurationError(f"worker_id {worker_id!r} already has a GPU: release it, or use another worker_id")
        try:
            lease = await self._native.request(request)
        except WorkerTimeoutError as error:
            waited = self._worker_timeout if timeout is None else timeout
            error.args = (f"Worker {error.worker_id} request timed out after {waited} seconds",)
            raise
        return self._add_assignment(lease)

    def _add_assignment(self, lease: _native.Lease) -> GPUAssignment:
        gpu_ids, assigned_at = lease.gpu_ids, _conversions.to_local_time(lease.assigned_at)
        gpu_id = gpu_ids[0] if gpu_ids else 0
        assignment = GPUAssignment(gpu_id, lease.worker_id, assigned_at)
        if self._is_multi:
            endpoint_id = lease.endpoint_id
            global_id = f"{endpoint_id}:{gpu_id}"
            assignment = GlobalGPUAssignment(global_id, endpoint_id, gpu_id, lease.worker_id, assigned_at)
        # Identifies the grant; not a field of the data class.
        assignment._grant = self._grant_id(lease)  # type: ignore[attr-defined]
        self._leases[lease.worker_id] = lease
        self._updates.assigned_gpus[lease.worker_id] = (gpu_ids, lease.id)
        log_assignment("GPU %s of %s assigned to worker %s", lease.worker_id, lease.endpoint_id, gpu_ids, lease.id)
        return assignment

    async def release_gpu(self, assignment: GPUAssignment) -> None:
        """Release a GPU at the server that granted it. Idempotent.

        Raise `ValueError` if this client never granted the assignment, and `StaleAssignmentError` if it was lost before.
        """
        if not self._native.is_started and self._native.is_ours:
            raise ClientStateError("Client must be started before releasing GPU")
        lease = self._lease_of(assignment)
        if lease is None:
            return
        del self._leases[lease.worker_id]
        try:
            await lease.release()
        finally:
            self._updates.assigned_gpus.pop(lease.worker_id, None)
            _log_release(lease)

    def check_assignment(self, assignment: GPUAssignment) -> None:
        """Raise `StaleAssignmentError` if the assignment is no longer valid."""
        lease = self._lease_of(assignment)
        if lease is None:
            raise StaleAssignmentError(f"the assignment of worker {assignment.worker_id} was released")
        lease.check()

    def assignment_env(self, assignment: GPUAssignment) -> Dict[str, Optional[str]]:
        """Return environment variables for a program that uses the GPU; unset a variable whose value is `None`."""
        lease = self._lease_of(assignment)
        return {} if lease is None else dict(lease.env)

    def _lease_of(self, assignment: GPUAssignment) -> Optional[_native.Lease]:
        """Return the lease of an assignment; `None` if it was released."""
        if not isinstance(assignment, GPUAssignment):
            raise InvalidAssignmentError(
                f"assignment must be a result of request_gpu(), got {assignment!r} ({type(assignment).__name__})"
            )
        lease = self._leases.get(assignment.worker_id)
        grant = getattr(assignment, "_grant", None)
        if grant is not None and grant[0] == self._client_id:
            # The worker may have a newer assignment.
            return lease if lease is not None and grant == self._grant_id(lease) else None
        # The program created this object from the fields of an assignment.
        if grant is None and lease is not None and assignment.gpu_id in (lease.gpu_ids or [0]):
            if getattr(assignment, "endpoint_id", lease.endpoint_id) == lease.endpoint_id:
                return lease
        raise InvalidAssignmentError(f"{assignment!r} was never granted by this client")

    def _grant_id(self, lease: _native.Lease) -> Tuple[str, str, int]:
        return (self._client_id, lease.endpoint_id, lease.id)

    def get_pool_status(self) -> PoolStatus:
        """Return the last known status of the pool; with several servers, a `MultiEndpointPoolStatus`."""
        return _conversions.to_pool_status(self._native.pool_status(), self._is_multi)

    def get_detailed_metrics(self) -> Dict[str, Any]:
        """Return all metrics."""
        return _conversions.to_metrics(self._native.detailed_metrics(), self._native.pool_status(), self._is_multi)

    def get_endpoints_info(self) -> Optional[List[Dict[str, Any]]]:
        """Return the details of all servers; `None` with one server, or if the client is not started."""
        if not self._is_multi or not self._native.is_started:
            return None
        return [_conversions.to_endpoint(info) for info in self._native.endpoints_info()]

    def get_error_recovery_status(self) -> Dict[str, Any]:
        """Return the state of failed servers and of their recovery."""
        return self._native.error_recovery_status()

    def print_error_recovery_summary(self) -> None:
        """Print a short report of the error recovery status."""
        print(self._native.error_recovery_summary(), end="")

    def get_health(self) -> Dict[str, Any]:
        """Return the overall `status` and the health that each server reports."""
        return self._native.health()

    async def trigger_endpoint_recovery(self, endpoint_id: str) -> bool:
        """Check a server now, even if its circuit breaker is open. Return `False` for an unknown server."""
        self._require_multi_endpoint("triggering endpoint recovery")
        if not isinstance(endpoint_id, str):
            raise ConfigurationError(f"endpoint_id must be a str, got {endpoint_id!r} ({type(endpoint_id).__name__})")
        return await self._native.trigger_endpoint_recovery(endpoint_id)

    @overload
    async def queue_request_for_retry(self, request_func: Callable[[], Awaitable[T]]) -> T: ...

    @overload
    async def queue_request_for_retry(self, request_func: Callable[[], T]) -> T: ...

    async def queue_request_for_retry(self, request_func: Callable[[], Any]) -> Any:
        """Call a function as soon as a server is healthy, and return its result."""
        if not callable(request_func):
            raise ConfigurationError(
                f"request_func must be a function to call, such as lambda: client.request_gpu(), got {request_func!r}"
            )
        self._require_multi_endpoint("queueing a request for retry")
        await self._native.until_healthy()
        result = request_func()
        return await result if hasattr(result, "__await__") else result

    def _require_multi_endpoint(self, operation: str) -> None:
        if not self._native.is_started and self._native.is_ours:
            raise ClientStateError(f"Client must be started before {operation}")
        if not self._is_multi:
            raise ClientStateError(f"{operation} needs several endpoints: set service_endpoints")

    def is_multi_endpoint_mode(self) -> bool:
        """Return whether the client has several servers."""
        return self._is_multi

    def subscribe(self, callback: Callable[[Update], object]) -> Callable[[], None]:
        """Call a function for each update, and return a function that unsubscribes it.

        An update is a dict whose `kind` is `statistics`, `endpoint_up`, `endpoint_down`, `blocked`, `unblocked`, `assigned`,
        `released`, `lost` or `missed`. The callback runs in the event loop that runs now, or in a thread of the client if no
        loop is running.
        """
        if not callable(callback):
            raise ConfigurationError(f"callback must be a function to call, got {callback!r}")
        subscriber = call_in_running_loop(callback)
        self._updates.add_subscriber(subscriber)
        self._native.set_wants_all(True)

        def unsubscribe() -> None:
            self._native.set_wants_all(self._updates.remove_subscriber(subscriber))

        return unsubscribe

    async def __aenter__(self) -> GPUWorkerPoolClient:
        await self.start()
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        # The block ends in a forked child: the assignments belong to the parent.
        if self._native.is_ours:
            await self.stop()


def _log_release(lease: _native.Lease) -> None:
    log_assignment("GPU %s of %s released by worker %s", lease.worker_id, lease.endpoint_id, lease.gpu_ids, lease.id)


class GPUContextManager:
    """Asynchronous context manager that requests a GPU for its block.

    It yields the number of the GPU, or with several servers `endpoint_id:gpu_id`.
    """

    def __init__(self, client: GPUWorkerPoolClient, timeout: Optional[float] = None, **request: Any) -> None:
        if not hasattr(client, "request_gpu"):
            raise ConfigurationError(f"client must be a GPUWorkerPoolClient, got {client!r} ({type(client).__name__})")
        self.client = client
        self.timeout = timeout
        #: Current assignment; `None` outside of the block.
        self.assignment: Optional[GPUAssignment] = None
        self._request = request
        self._entering_pid = 0

    async def __aenter__(self) -> Union[int, str]:
        self.assignment = await self.client.request_gpu(self.timeout, **self._request)
        self._entering_pid = os.getpid()
        if isinstance(self.assignment, GlobalGPUAssignment):
            return self.assignment.global_gpu_id
        return self.assignment.gpu_id

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        assignment, self.assignment = self.assignment, None
        if assignment is None or self._entering_pid != os.getpid():
            return
        try:
            await self.client.release_gpu(assignment)
        except ClientStateError:
            # The client was stopped in the block, which released the assignment.
            pass
        except StaleAssignmentError:
            # The error of the block is more informative.
            if error is None:
                raise


class gpu_worker_pool_client:  # noqa: N801 - called as a function
    """Context manager `async with gpu_worker_pool_client(...) as client` that starts a client and stops it at the end."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._client = GPUWorkerPoolClient(*arguments, **settings)

    async def __aenter__(self) -> GPUWorkerPoolClient:
        await self._client.start()
        return self._client

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        await self._client.__aexit__(kind, error, trace)
