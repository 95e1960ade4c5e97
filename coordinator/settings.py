"""What a coordinator is started with."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.policies import Policies


@dataclass(frozen=True)
class Settings:
    """Durations in seconds; docs/timeouts.md lists them with what must exceed which."""

    policies: Policies = field(default_factory=Policies)
    reattach_s: float = 1.0
    lost_after_s: float = 30.0
    silent_after_s: float = 25.0  # a proxied session without a beat, which is due every 10 s
    proxied_lost_after_s: float = 120.0

    def __post_init__(self) -> None:
        if self.lost_after_s < self.reattach_s:
            raise ValueError(
                f"lost_after_s {self.lost_after_s:g} is below reattach_s {self.reattach_s:g}: after"
                " the verdict a process may stay away for at least as long as before; raise it"
            )
        if self.proxied_lost_after_s < max(self.lost_after_s, 2 * self.silent_after_s):
            raise ValueError(
                f"proxied_lost_after_s {self.proxied_lost_after_s:g} is below lost_after_s"
                f" {self.lost_after_s:g} or twice the {self.silent_after_s:g} s that make a session"
                " without beats suspect: behind a proxy less is known, not sooner; raise it"
            )
