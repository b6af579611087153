"""Release all leases when the interpreter exits, so that GPUs are free before the leases expire."""

from __future__ import annotations

import atexit
import weakref
from typing import TYPE_CHECKING

from ._native import wait_for_ending

if TYPE_CHECKING:
    from ._native import Client

_started_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def stop_at_exit(client: Client) -> None:
    """Stop a client when this process exits, unless the client was stopped before."""
    _started_clients.add(client)


@atexit.register
def _stop_clients() -> None:
    for client in list(_started_clients):
        # `is_started` is false for a client that was started before a fork: only the parent may stop it.
        if client.is_started:
            client.stop_blocking()
    wait_for_ending()
