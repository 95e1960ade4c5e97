"""How long Hypothesis searches: CI asks the same bounded questions each time, a night asks more.

KVACCORD_EXAMPLES_TIMES=100 .venv/bin/pytest tests/properties --timeout 0
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

TIMES = int(os.environ.get("KVACCORD_EXAMPLES_TIMES", "1"))


def search(examples: int, *, steps: int = 50) -> settings:
    """So many examples in CI, always the same; more of them, and others, by the factor TIMES."""
    return settings(
        max_examples=examples * TIMES,
        stateful_step_count=steps,
        derandomize=TIMES == 1,
        deadline=None,  # a busy machine is slow, not wrong
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
