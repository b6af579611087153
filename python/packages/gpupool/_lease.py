"""Leases: GPUs that are held for a while, for programs with and without asyncio."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Type, Union

from . import _exit, _native, _settings
from .errors import ClientStateError, StaleAssignmentError

if TYPE_CHECKING:
    PathLike = Union[str, "os.PathLike[str]"]


class Lease:
    """GPUs that are held until the lease is released, its block is left, or it is lost.

    It is renewed in the background. A forked child's copy neither renews nor releases it.
    """

    def __init__(self, held: _native.Lease, client: _native.Client) -> None:
        self._held = held
        self._client = client

    @property
    def id(self) -> int:
        """Its number on the server that granted it."""
        return self._held.id

    @property
    def gpu_id(self) -> Optional[int]:
        """The number of its GPU, of the first one where it has several; `None` where it has none."""
        gpu_ids = self._held.gpu_ids
        return gpu_ids[0] if gpu_ids else None

    @property
    def gpu_ids(self) -> List[int]:
        """The numbers of its GPUs."""
        return self._held.gpu_ids

    @property
    def devices(self) -> List[Dict[str, Any]]:
        """Its GPUs: `gpu_id`, `node`, `uuid`, `vendor`, `name`, `fraction`, `memory_mib` of each.

        `node` is the name of the machine whose number `gpu_id` is; empty from an older agent.
        """
        return [dict(device) for device in self._held.devices]

    @property
    def env(self) -> Dict[str, Optional[str]]:
        """What to set in the environment of a program that uses it; `None` means that the variable must not be set."""
        return dict(self._held.env)

    @property
    def token(self) -> Optional[int]:
        """Grows with every grant: what is written under the lease can be fenced by it."""
        return self._held.token

    @property
    def worker_id(self) -> str:
        """Who holds it."""
        return self._held.worker_id

    @property
    def endpoint_id(self) -> str:
        """The server that granted it."""
        return self._held.endpoint_id

    @property
    def lost(self) -> Optional[str]:
        """Why it is not held any more, though nobody released it; `None` while it is."""
        return self._held.lost

    def check(self) -> None:
        """Raises `StaleAssignmentError` where it is not held any more."""
        self._held.check()
        if not self._held.is_held:
            raise StaleAssignmentError(f"lease {self.id} was given back")

    def release(self) -> None:
        """Gives it back, and waits until that is certain. Twice is harmless."""
        try:
            self._held.release_blocking()
        finally:
            self._client.stop_blocking()

    async def release_async(self) -> None:
        """The same for asyncio."""
        try:
            await self._held.release()
        finally:
            await self._client.stop()

    def __repr__(self) -> str:
        return f"<gpupool.Lease {self.id} of {self.endpoint_id}: GPUs {self.gpu_ids}>"


class LeaseBlock:
    """`with` this, or `async with` it, and GPUs are held until the block is left."""

    def __init__(self, settings: Dict[str, Any], wish: Dict[str, Any], sets_environment: bool) -> None:
        self._settings = settings
        self._wish = wish
        self._sets_environment = sets_environment
        self._lease: Optional[Lease] = None
        self._before: Dict[str, Optional[str]] = {}

    def __enter__(self) -> Lease:
        client = self._new_client()
        try:
            client.start_blocking()
            return self._entered(client.request_blocking(self._wish), client)
        except BaseException:
            client.stop_soon()
            raise

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        lease = self._left()
        if not lease._client.is_ours:
            # A forked child that leaves the block leaves what is its parent's alone.
            return
        try:
            lease.release()
        except StaleAssignmentError:
            # What went wrong first says more.
            if error is None:
                raise

    async def __aenter__(self) -> Lease:
        client = self._new_client()
        try:
            await client.start()
            return self._entered(await client.request(self._wish), client)
        except BaseException:
            client.stop_soon()
            raise

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        lease = self._left()
        if not lease._client.is_ours:
            return
        try:
            await lease.release_async()
        except StaleAssignmentError:
            if error is None:
                raise

    def _new_client(self) -> _native.Client:
        if self._lease is not None:
            raise ClientStateError("this lease is held already: ask for another one with gpupool.lease()")
        client = _native.Client(self._settings)
        _exit.stop_at_exit(client)
        return client

    def _entered(self, held: _native.Lease, client: _native.Client) -> Lease:
        self._lease = Lease(held, client)
        if self._sets_environment:
            for name, value in held.env.items():
                self._before[name] = os.environ.get(name)
                _set(name, value)
        return self._lease

    def _left(self) -> Lease:
        lease, self._lease = self._lease, None
        for name, value in self._before.items():
            _set(name, value)
        self._before.clear()
        if lease is None:
            raise ClientStateError("this lease is not held: enter its block first")
        return lease


def _set(name: str, value: Optional[str]) -> None:
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
    """Holds GPUs for a `with` or `async with` block: a whole one unless a part is asked for.

    Waits its turn, for `timeout` seconds at most, and not at all with `wait=False`. The agent is `endpoint`, or what the
    environment names, or the one of this machine. With `set_environment` the variables of the lease
    (`CUDA_VISIBLE_DEVICES` and alike) are set in this process while the block runs.
    """
    wish = {
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
    # Whoever gave no limit waits its turn.
    limit = float("inf") if timeout is None else timeout
    return LeaseBlock(_asked_from(endpoint, token, ca_file), _settings.wish(limit, wish), set_environment)


def status(
    *,
    endpoint: Union[str, Sequence[str], None] = None,
    token: Optional[str] = None,
    ca_file: Optional[PathLike] = None,
) -> Dict[str, Any]:
    """How the pool stands: GPUs, which of them are available, and the servers, as plain dicts and lists."""
    client = _native.Client(_asked_from(endpoint, token, ca_file))
    client.start_blocking()
    try:
        return {**client.pool_status(), "gpus": client.detailed_metrics()["gpus"]}
    finally:
        client.stop_blocking()


def _asked_from(
    endpoint: Union[str, Sequence[str], None], token: Optional[str], ca_file: Optional[PathLike]
) -> Dict[str, Any]:
    is_several = endpoint is not None and (not isinstance(endpoint, str) or "," in endpoint)
    return _settings.settings(
        prefers_socket=True,
        service_endpoint=None if is_several else endpoint,
        service_endpoints=endpoint if is_several else None,
        token=token,
        ca_file=ca_file,
    )
