"""A second opinion on a decision: its own arithmetic, and nothing of the planner."""

from verifier.check import Checked, verify
from verifier.lies import Lie

__all__ = ["Checked", "Lie", "verify"]
