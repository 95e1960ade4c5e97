"""vLLM: agreed numbers of KV blocks, attached from outside. docs/engines/vllm.md is the page.

vLLM calls `register` in every process of an engine, by the entry point `kvaccord` in the group
`vllm.general_plugins`. Without a coordinator nothing else is loaded.
"""

import os


def register() -> None:
    """Attend vLLM's workers, unless KVACCORD_MODE is off or nothing names a coordinator.

    Raises Invalid in mode enforce where this vLLM is not one that can be attended.
    """
    mode = os.environ.get("KVACCORD_MODE", "").strip()
    if mode == "off" or not (mode or os.environ.get("KVACCORD_URL", "").strip()):
        return
    from worker_client.engines.vllm.attend import attend

    attend()
