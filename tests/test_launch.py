"""Which start a process belongs to."""

import pytest

from kvaccord.errors import Invalid, LaunchMissing
from kvaccord.messages import Launch
from worker_client.launch import launch_from

MASTER = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "4711"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "run-a", "TORCHELASTIC_RESTART_COUNT": "2"}


def launched(environ, world_size=8):
    return launch_from(environ, world_size=world_size, nonce="0" * 32)


@pytest.mark.parametrize(
    ("environ", "run", "restart", "source"),
    [
        ({"KVACCORD_LAUNCH": "job-1"}, "job-1", 0, "env"),
        ({"KVACCORD_LAUNCH": "job-1#3"}, "job-1", 3, "env"),
        ({"KVACCORD_LAUNCH": "job#1#3"}, "job#1", 3, "env"),
        ({"KVACCORD_LAUNCH": "job-1#last"}, "job-1#last", 0, "env"),
        ({"KVACCORD_LAUNCH": "#3"}, "#3", 0, "env"),
        (TORCHRUN, "run-a", 2, "torchrun"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "1"}, "run-a", 2, "torchrun"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "2"}, "run-a", 0, "torchrun"),
        ({"TORCHELASTIC_RUN_ID": "run-a"}, "run-a", 0, "torchrun"),
        (SLURM, "4711", 0, "slurm"),
        (SLURM | {"SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"}, "4711.0", 1, "slurm"),
        (MASTER, "node-0:29500", 0, "master"),
        (MASTER | SLURM | TORCHRUN | {"KVACCORD_LAUNCH": "x"}, "x", 0, "env"),
        (MASTER | SLURM | TORCHRUN, "run-a", 2, "torchrun"),
        (MASTER | SLURM, "4711", 0, "slurm"),
    ],
)
def test_the_launcher_says_which_start_it_is(environ, run, restart, source):
    assert launched(environ) == Launch(run=run, restart=restart, source=source)


@pytest.mark.parametrize("placeholder", ["none", "None", "", " ", "default"])
@pytest.mark.parametrize("variable", ["KVACCORD_LAUNCH", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"])
def test_a_placeholder_counts_as_absent(variable, placeholder):
    assert launched({variable: placeholder} | MASTER).source == "master"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"TORCHELASTIC_RUN_ID": "none"},
        {"MASTER_ADDR": "node-0"},
        {"MASTER_PORT": "29500"},
        {"RAY_JOB_ID": "01000000"},
        {"LWS_LEADER_ADDRESS": "lws-0.lws.default"},
    ],
)
def test_a_larger_world_without_a_launch_is_told_what_was_looked_for(environ):
    with pytest.raises(LaunchMissing, match=r"KVACCORD_LAUNCH, TORCHELASTIC_RUN_ID.*MASTER_PORT"):
        launched(environ)


def test_a_world_of_one_is_a_start_of_its_own():
    assert launched({}, world_size=1).run == "0" * 32


@pytest.mark.parametrize("restart", ["two", "-1", "1.0", "²"])
def test_a_restart_that_is_no_number_is_refused(restart):
    with pytest.raises(Invalid, match="SLURM_RESTART_COUNT"):
        launched(SLURM | {"SLURM_RESTART_COUNT": restart})


@pytest.mark.parametrize("run", ["two words", "r" * 201, "läuft"])
def test_a_run_that_cannot_be_sent_is_refused(run):
    with pytest.raises(Invalid, match="KVACCORD_LAUNCH"):
        launched({"KVACCORD_LAUNCH": run})
