"""Gives everything back when the interpreter ends, so that nobody waits for it to run out."""

from __future__ import annotations

import atexit
import weakref
from typing import TYPE_CHECKING

from ._native import wait_for_ending

if TYPE_CHECKING:
    from ._native import Client

_started: "weakref.WeakSet[Client]" = weakref.WeakSet()


def stop_at_exit(client: Client) -> None:
    """Stops a client at the end of this process, if nobody did before."""
    _started.add(client)


@atexit.register
def _stop_all() -> None:
    for client in list(_started):
        # A forked child's copy is not the child's to stop.
        if client.is_started:
            client.stop_blocking()
    wait_for_ending()
