"""Every guard that is removed in turn, by its name. A file for each room."""

from __future__ import annotations

from tests.simulation.removals import client, presence, rules, shell, stores
from tests.simulation.removals.guard import Guard

GUARDS: dict[str, Guard] = (
    rules.GUARDS | shell.GUARDS | stores.GUARDS | presence.GUARDS | client.GUARDS
)

# What CI looks at: a guard of each room, whose seeds are small worlds.
FIXED = (
    "passed over a veto",
    "no fence between launches",
    "sealed without comparing the digest",
    "told before it is durable",
    "the number of an append is not compared",
    "an answer clears nobody",
    "nobody may stay away at all",
    "the client goes on after FAILED",
)
