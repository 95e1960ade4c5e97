"""Which start this process belongs to, as the launcher's environment tells it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from pydantic import ValidationError

from kvaccord.errors import Invalid, LaunchMissing
from kvaccord.messages import Launch

# Values that name no run: torchrun over several nodes says "none" without --rdzv-id.
PLACEHOLDERS = {"", "none", "default"}
RAY_JOB = "the job of Ray"  # no variable has such a name

Environ = Mapping[str, str]
Found = tuple[str, int]  # run and restart


def launch_from(environ: Environ, *, world_size: int, nonce: str) -> Launch:
    """The launch of this process; a world of one is a start of its own.

    environ: what surroundings() says. The first of LAUNCHERS that names a run counts: what is
    started inside another stands before it.
    Raises LaunchMissing when a larger world has none, since two starts could not be told apart;
    Invalid where a run cannot be sent or a restart is no number.
    """
    if run := _word(environ, "KVACCORD_LAUNCH"):
        return parse(run)
    for launcher in LAUNCHERS:
        if found := launcher.says(environ):
            return _made(*found, launcher.source)
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


def surroundings() -> dict[str, str]:
    """The environment of this process, and what Ray's runtime says beside it, where it is loaded.

    Ray starts workers ahead of any job, and those keep the nil RAY_JOB_ID when they become actors
    of one: the variable differs within one start (tests/launches.json has such a one). A job's
    number alone would not do either, since every cluster counts from 1.
    """
    said = dict(os.environ)
    ray = sys.modules.get("ray")
    # Whatever version of Ray it is, a launch can still be said otherwise.
    with suppress(Exception):
        if ray is not None and ray.is_initialized():
            context = ray.get_runtime_context()
            said[RAY_JOB] = f"{context.gcs_address}/{context.get_job_id()}"
    return said


# --- the launchers ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launcher:
    """Where one launcher says which start it is. looked_for: the variables, for the refusal."""

    source: str
    looked_for: str
    says: Callable[[Environ], Found | None]


def _torchrun(environ: Environ) -> Found | None:
    # Each node counts the failures of its own workers, and restarts for others' too: after a
    # restart the counts of several nodes differ, though the start is one. Their agents stop all
    # old workers, so there the same launch again is told apart by who is gone.
    # Source: torch elastic agent/server/api.py, "membership changes do not count as retries".
    if not (run := _word(environ, "TORCHELASTIC_RUN_ID")):
        return None
    alone = _count(environ, "GROUP_WORLD_SIZE") <= 1
    return run, _count(environ, "TORCHELASTIC_RESTART_COUNT") if alone else 0


def _mpi(environ: Environ) -> Found | None:
    # PROGRAM-HOST-PID@N of the mpirun that started it. Under srun --mpi=pmix it is
    # slurm.pmix.JOB.STEP, which a requeued job has again: Slurm itself says more.
    # MPICH and Intel MPI name nothing that tells one start from the next.
    run = _word(environ, "PMIX_NAMESPACE")
    return (run, 0) if run and not run.startswith("slurm.") else None


def _slurm(environ: Environ) -> Found | None:
    # srun counts the steps of a job: every srun is a start of its own.
    if not (job := _word(environ, "SLURM_JOB_ID")):
        return None
    step = _word(environ, "SLURM_STEP_ID")
    return f"{job}.{step}" if step else job, _count(environ, "SLURM_RESTART_COUNT")


def _jobset(environ: Environ) -> Found | None:
    # JobSet sets labels and annotations; the pod's template makes variables of them. The name
    # will not do: applied again, a JobSet counts its attempts from 0 under the same name.
    # Source: kubernetes-sigs/jobset api/jobset/v1alpha2/jobset_types.go, JobSetUIDKey, RestartsKey.
    uid = _word(environ, "JOBSET_UID")
    return (uid, _count(environ, "JOBSET_RESTART_ATTEMPT")) if uid else None


def _ray(environ: Environ) -> Found | None:
    run = _word(environ, RAY_JOB)
    return (run, 0) if run else None


def _lws(environ: Environ) -> Found | None:
    # A group that is recreated has the same address again, and its label group-key likewise.
    # Source: kubernetes-sigs/lws pkg/utils/pod/pod_utils.go, AddLWSVariables.
    run = _word(environ, "LWS_LEADER_ADDRESS")
    return (run, 0) if run else None


def _master(environ: Environ) -> Found | None:
    address, port = _word(environ, "MASTER_ADDR"), _word(environ, "MASTER_PORT")
    return (f"{address}:{port}", 0) if address and port else None


# mpirun inside a Slurm job starts its daemons with srun and the ranks beside itself without, so
# their steps may differ: MPI stands before Slurm. Ray inside a LeaderWorkerSet or a Slurm job may
# start an engine anew in the same group or step; there its job says more than LWS, and less than
# Slurm's counters.
LAUNCHERS = (
    Launcher("torchrun", "TORCHELASTIC_RUN_ID (torchrun --rdzv-id)", _torchrun),
    Launcher("mpi", "PMIX_NAMESPACE", _mpi),
    Launcher("slurm", "SLURM_JOB_ID", _slurm),
    Launcher("jobset", "JOBSET_UID (from the pod's labels)", _jobset),
    Launcher("ray", "a job of Ray", _ray),
    Launcher("lws", "LWS_LEADER_ADDRESS", _lws),
    Launcher("master", "MASTER_ADDR with MASTER_PORT", _master),
)
LOOKED_FOR = ("KVACCORD_LAUNCH", *(launcher.looked_for for launcher in LAUNCHERS))


def _word(environ: Environ, name: str) -> str:
    value = environ.get(name, "").strip()
    return "" if value.lower() in PLACEHOLDERS else value


def _count(environ: Environ, name: str) -> int:
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
