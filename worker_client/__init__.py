"""What a GPU worker imports: one rendezvous per start, and a way to measure its device.

A name is loaded when it is first used: an adapter's entry point, which every process of an engine
loads, costs nothing where no coordinator is named.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker_client.aio import AsyncRendezvous
    from worker_client.client import Rendezvous
    from worker_client.flow import Fit, Room, Standing
    from worker_client.measure import cuda_device, cuda_reading, cuda_report
    from worker_client.steps import Agreed
    from worker_client.stopping import Exit

__all__ = [
    "Agreed",
    "AsyncRendezvous",
    "Exit",
    "Fit",
    "Rendezvous",
    "Room",
    "Standing",
    "cuda_device",
    "cuda_reading",
    "cuda_report",
]

_HOME = {
    "Agreed": "steps",
    "AsyncRendezvous": "aio",  # and asyncio with it
    "Exit": "stopping",
    "Fit": "flow",
    "Rendezvous": "client",
    "Room": "flow",
    "Standing": "flow",
    "cuda_device": "measure",
    "cuda_reading": "measure",
    "cuda_report": "measure",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
