"""What both sides of kvaccord hold word for word: messages, layout, errors, planner. Pure."""

from kvaccord.layout import Layout
from kvaccord.messages import CacheClass, Report, page, state

__all__ = ["CacheClass", "Layout", "Report", "page", "state"]
__version__ = "0.1.0"
