"""Leases of GPUs, for programs with and without asyncio."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Type, Union

from . import _client_arguments, _exit_cleanup, _native
from .errors import ClientStateError, StaleAssignmentError

if TYPE_CHECKING:
    PathLike = Union[str, "os.PathLike[str]"]


class Lease:
    """GPUs that are leased until the lease is released, its block ends, or the lease is lost.

    The lease is renewed in the background. A copy in a forked child neither renews nor releases it.
    """

    def __init__(self, native_lease: _native.Lease, client: _native.Client) -> None:
        self._native_lease = native_lease
        self._client = client

    @property
    def id(self) -> int:
        """Number of the lease on the server that granted it."""
        return self._native_lease.id

    @property
    def gpu_id(self) -> Optional[int]:
        """Number of the leased GPU, or of the first if there are several; `None` if the lease has no GPU."""
        gpu_ids = self._native_lease.gpu_ids
        return gpu_ids[0] if gpu_ids else None

    @property
    def gpu_ids(self) -> List[int]:
        """Numbers of the leased GPUs."""
        return self._native_lease.gpu_ids

    @property
    def devices(self) -> List[Dict[str, Any]]:
        """Leased GPUs: `gpu_id`, `node`, `uuid`, `vendor`, `name`, `fraction`, `memory_mib` of each.

        `node` is the name of the GPU's machine, on which `gpu_id` is its number; empty if the agent is older.
        """
        return [dict(device) for device in self._native_lease.devices]

    @property
    def env(self) -> Dict[str, Optional[str]]:
        """Environment variables for a program that uses the GPUs; unset a variable whose value is `None`."""
        return dict(self._native_lease.env)

    @property
    def token(self) -> Optional[int]:
        """Fencing token: it grows with every grant, so storage can reject writes from an earlier lease."""
        return self._native_lease.token

    @property
    def worker_id(self) -> str:
        """Worker that holds the lease."""
        return self._native_lease.worker_id

    @property
    def endpoint_id(self) -> str:
        """Server that granted the lease."""
        return self._native_lease.endpoint_id

    @property
    def lost(self) -> Optional[str]:
        """Reason why the lease was lost; `None` unless it was lost."""
        return self._native_lease.lost

    def check(self) -> None:
        """Raise `StaleAssignmentError` if the lease is no longer active."""
        self._native_lease.check()
        if not self._native_lease.is_held:
            raise StaleAssignmentError(f"lease {self.id} was released")

    def release(self) -> None:
        """Release the lease and wait for the server's confirmation. Idempotent."""
        try:
            self._native_lease.release_blocking()
        finally:
            self._client.stop_blocking()

    async def release_async(self) -> None:
        """Do the same as `release`, for asyncio."""
        try:
            await self._native_lease.release()
        finally:
            await self._client.stop()

    def __repr__(self) -> str:
        return f"<gpupool.Lease {self.id} of {self.endpoint_id}: GPUs {self.gpu_ids}>"


class LeaseBlock:
    """Context manager for `with` and `async with` that leases GPUs for the block."""

    def __init__(self, settings: Dict[str, Any], request: Dict[str, Any], sets_environment: bool) -> None:
        self._settings = settings
        self._request = request
        self._sets_environment = sets_environment
        self._lease: Optional[Lease] = None
        self._previous_environment: Dict[str, Optional[str]] = {}

    def __enter__(self) -> Lease:
        client = self._new_client()
        try:
            client.start_blocking()
            return self._enter_lease(client.request_blocking(self._request), client)
        except BaseException:
            client.stop_soon()
            raise

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        lease = self._leave_lease()
        if not lease._client.is_ours:
            # The block ends in a forked child: the lease belongs to the parent.
            return
        try:
            lease.release()
        except StaleAssignmentError:
            # The error of the block is more informative.
            if error is None:
                raise

    async def __aenter__(self) -> Lease:
        client = self._new_client()
        try:
            await client.start()
            return self._enter_lease(await client.request(self._request), client)
        except BaseException:
            client.stop_soon()
            raise

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        lease = self._leave_lease()
        if not lease._client.is_ours:
            return
        try:
            await lease.release_async()
        except StaleAssignmentError:
            if error is None:
                raise

    def _new_client(self) -> _native.Client:
        if self._lease is not None:
            raise ClientStateError("this lease is already active: call gpupool.lease() for another one")
        client = _native.Client(self._settings)
        _exit_cleanup.stop_at_exit(client)
        return client

    def _enter_lease(self, native_lease: _native.Lease, client: _native.Client) -> Lease:
        self._lease = Lease(native_lease, client)
        if self._sets_environment:
            for name, value in native_lease.env.items():
                self._previous_environment[name] = os.environ.get(name)
                _set_variable(name, value)
        return self._lease

    def _leave_lease(self) -> Lease:
        lease, self._lease = self._lease, None
        for name, value in self._previous_environment.items():
            _set_variable(name, value)
        self._previous_environment.clear()
        if lease is None:
            raise ClientStateError("this lease is not active: enter its block first")
        return lease


def _set_variable(name: str, value: Optional[str]) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def lease(
    *,
    fraction: Optional[float] = None,
    memory_mib: Optional[int] = None,
    gpus: Optional[int] = None,
    priority: Optional[int] = None,
    timeout: Optional[float] = None,
    endpoint: Union[str, Sequence[str], None] = None,
    wait: bool = True,
    worker_id: Optional[str] = None,
    labels: Optional[Mapping[str, str]] = None,
    select: Optional[Mapping[str, Any]] = None,
    strategy: Optional[str] = None,
    ttl: Optional[float] = None,
    max_duration: Optional[float] = None,
    token: Optional[str] = None,
    ca_file: Optional[PathLike] = None,
    set_environment: bool = False,
) -> LeaseBlock:
    """Lease GPUs for a `with` or `async with` block: a whole GPU unless the arguments request a part.

    The request waits in the queue for at most `timeout` seconds, or not at all with `wait=False`. The agent is `endpoint`,
    else the agent in the environment, else the agent of this machine. With `set_environment`, the variables of the lease
    (such as `CUDA_VISIBLE_DEVICES`) are set in this process during the block.
    """
    request = {
        "fraction": fraction,
        "memory_mib": memory_mib,
        "gpus": gpus,
        "priority": priority,
        "queue": None if wait else False,
        "worker_id": worker_id,
        "labels": labels,
        "select": select,
        "strategy": strategy,
        "ttl_secs": ttl,
        "max_duration_secs": max_duration,
    }
    wait_limit = float("inf") if timeout is None else timeout
    request = _client_arguments.build_request(wait_limit, request)
    return LeaseBlock(_client_settings(endpoint, token, ca_file), request, set_environment)


def status(
    *,
    endpoint: Union[str, Sequence[str], None] = None,
    token: Optional[str] = None,
    ca_file: Optional[PathLike] = None,
) -> Dict[str, Any]:
    """Return the state of the pool: all GPUs, the available GPUs and the servers, as plain dicts and lists."""
    client = _native.Client(_client_settings(endpoint, token, ca_file))
    client.start_blocking()
    try:
        return {**client.pool_status(), "gpus": client.detailed_metrics()["gpus"]}
    finally:
        client.stop_blocking()


def _client_settings(
    endpoint: Union[str, Sequence[str], None], token: Optional[str], ca_file: Optional[PathLike]
) -> Dict[str, Any]:
    has_several = endpoint is not None and (not isinstance(endpoint, str) or "," in endpoint)
    return _client_arguments.build_client_settings(
        prefers_socket=True,
        service_endpoint=None if has_several else endpoint,
        service_endpoints=endpoint if has_several else None,
        token=token,
        ca_file=ca_file,
    )
