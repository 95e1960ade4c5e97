"""What a GPU worker imports: one rendezvous per start, and a way to measure its device."""

from worker_client.client import Agreed, Rendezvous
from worker_client.measure import cuda_report

__all__ = ["Agreed", "Rendezvous", "cuda_report"]
