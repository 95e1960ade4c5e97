"""Which start this process belongs to, as the launcher's environment tells it."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from kvaccord.errors import Invalid, LaunchMissing
from kvaccord.messages import Launch

# Run ids that name no run: torchrun's default is "none".
PLACEHOLDERS = {"", "none", "default"}

LOOKED_FOR = (
    "KVACCORD_LAUNCH",
    "TORCHELASTIC_RUN_ID (torchrun --rdzv-id)",
    "SLURM_JOB_ID",
    "MASTER_ADDR with MASTER_PORT",
)

# Left out, because no variable tells one start from the next:
# LeaderWorkerSet sets LWS_LEADER_ADDRESS, LWS_GROUP_SIZE and LWS_WORKER_INDEX, which a recreated
#   group has again. Source: kubernetes-sigs/lws pkg/utils/pod/pod_utils.go, AddLWSVariables.
# JobSet sets none. Many set JOBSET_RESTART_ATTEMPT from its annotation themselves, but a JobSet
#   that is deleted and applied again starts from 0 under the same name: that needs its uid too.
# Ray sets RAY_JOB_ID, a counter: one driver may start an engine twice, and a new cluster counts
#   from 1 again. Source: ray src/ray/raylet/worker_pool.cc.
# Under each of them KVACCORD_LAUNCH says it: RUN, or RUN#RESTART where a counter goes with it.


def launch_from(environ: Mapping[str, str], *, world_size: int, nonce: str) -> Launch:
    """The launch of this process; a world of one is a start of its own.

    Raises LaunchMissing when a larger world has none: two starts could not be told apart.
    """
    if run := _word(environ, "KVACCORD_LAUNCH"):
        return parse(run)
    if run := _word(environ, "TORCHELASTIC_RUN_ID"):
        # Each node counts the failures of its own workers, and restarts for others' too: after a
        # restart the counts of several nodes differ, though the start is one. Their agents stop
        # all old workers, so there the same launch again is told apart by who is gone.
        # Source: torch elastic agent/server/api.py, "membership changes do not count as retries".
        alone = _count(environ, "GROUP_WORLD_SIZE") <= 1
        restart = _count(environ, "TORCHELASTIC_RESTART_COUNT") if alone else 0
        return _made(run, restart, "torchrun")
    if run := _word(environ, "SLURM_JOB_ID"):
        # srun counts the steps of a job: every srun is a start of its own.
        step = _word(environ, "SLURM_STEP_ID")
        run = f"{run}.{step}" if step else run
        return _made(run, _count(environ, "SLURM_RESTART_COUNT"), "slurm")
    address, port = _word(environ, "MASTER_ADDR"), _word(environ, "MASTER_PORT")
    if address and port:
        return _made(f"{address}:{port}", 0, "master")
    if world_size == 1:
        return _made(nonce, 0, "env")
    raise LaunchMissing(
        f"a world of {world_size} ranks and no launch, so ranks of two starts could not be told"
        f" apart; looked for {', '.join(LOOKED_FOR)}; set KVACCORD_LAUNCH to one value that all"
        " processes of this start share and no other start has",
        field="KVACCORD_LAUNCH",
    )


def parse(text: str) -> Launch:
    """RUN, or RUN#RESTART: a greater restart of the same run takes over from a smaller one."""
    run, mark, restart = text.rpartition("#")
    if mark and run and restart.isascii() and restart.isdigit():
        return _made(run, int(restart), "env")
    return _made(text, 0, "env")


def _word(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "").strip()
    return "" if value.lower() in PLACEHOLDERS else value


def _count(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "").strip() or "0"
    if not (value.isascii() and value.isdigit()):
        raise Invalid(f"{name} is {value!r}; it must be a whole number", field=name, value=value)
    return int(value)


def _made(run: str, restart: int, source: str) -> Launch:
    try:
        return Launch.model_validate({"run": run, "restart": restart, "source": source})
    except ValidationError:
        raise Invalid(
            f"the launch {run[:200]!r} must be 1 to 200 printable ASCII characters without spaces;"
            " set KVACCORD_LAUNCH",
            field="KVACCORD_LAUNCH",
            value=run[:200],
        ) from None
