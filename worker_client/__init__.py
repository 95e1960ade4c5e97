"""What a GPU worker imports: one rendezvous per start, and a way to measure its device."""

from typing import TYPE_CHECKING, Any

from worker_client.client import Rendezvous
from worker_client.flow import Fit, Room, Standing
from worker_client.measure import cuda_report
from worker_client.steps import Agreed
from worker_client.stopping import Exit

if TYPE_CHECKING:
    from worker_client.aio import AsyncRendezvous

__all__ = [
    "Agreed",
    "AsyncRendezvous",
    "Exit",
    "Fit",
    "Rendezvous",
    "Room",
    "Standing",
    "cuda_report",
]


def __getattr__(name: str) -> Any:
    # Loading asyncio costs those who block nothing.
    if name == "AsyncRendezvous":
        from worker_client.aio import AsyncRendezvous

        return AsyncRendezvous
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
