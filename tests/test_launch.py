"""Which start a process belongs to."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvaccord.errors import Invalid, LaunchMissing
from kvaccord.messages import Launch
from worker_client.launch import LAUNCHERS, launch_from, surroundings

# Environments of real starts, a list for each start and in it one for each process.
RECORDED = json.loads((Path(__file__).parent / "launches.json").read_text())
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
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        {"JOBSET_NAME": "llama", "JOBSET_RESTART_ATTEMPT": "1"},
        {"LWS_LEADER_ADDRESS": ""},
    ],
)
def test_a_larger_world_without_a_launch_is_told_what_was_looked_for(environ):
    with pytest.raises(
        LaunchMissing, match=r"KVACCORD_LAUNCH, TORCHELASTIC_RUN_ID.*MASTER_PORT"
    ) as e:
        launched(environ)
    assert all(launcher.looked_for in str(e.value) for launcher in LAUNCHERS)


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


# --- as launchers really set them ---------------------------------------------------------------


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["launcher"])
def test_all_processes_of_a_start_say_one_launch(case):
    for processes, launch in zip(case["starts"], case["launches"], strict=True):
        for environ in processes:
            if launch is None:
                with pytest.raises(LaunchMissing):
                    launched(environ)
            else:
                assert launched(environ) == Launch(**launch)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["launcher"])
def test_no_two_starts_are_one_launch(case):
    said = [json.dumps(launch) for launch in case["launches"]]
    assert len(set(said)) == len(said)


def test_every_launcher_is_recorded_but_ray_whose_variables_say_nothing():
    said = {launch["source"] for case in RECORDED for launch in case["launches"] if launch}
    assert said == {"env", *(launcher.source for launcher in LAUNCHERS)} - {"ray"}


def test_what_counts_nothing_spoils_nothing():
    environ = {"JOBSET_RESTART_ATTEMPT": "x", "SLURM_RESTART_COUNT": "x"} | MASTER
    assert launched(environ).source == "master"


class FakeRay:
    """A Ray runtime as a worker of job 01000000 sees it. Recorded with ray 2.60.0."""

    def __init__(self, initialized=True, fault=None):
        self.initialized, self.fault = initialized, fault

    def is_initialized(self):
        return self.initialized

    def get_runtime_context(self):
        if self.fault:
            raise self.fault
        return SimpleNamespace(gcs_address="192.0.2.2:41399", get_job_id=lambda: "01000000")


def test_ray_is_asked_where_it_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    monkeypatch.setenv("RAY_JOB_ID", "ffffffff")
    expected = Launch(run="192.0.2.2:41399/01000000", source="ray")
    assert launched(surroundings()) == expected


@pytest.mark.parametrize("ray", [FakeRay(initialized=False), FakeRay(fault=RuntimeError("shut"))])
def test_a_ray_that_says_nothing_is_no_launcher(monkeypatch, ray):
    without = surroundings()
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert surroundings() == without


def test_the_job_of_ray_stands_before_the_group_it_runs_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    assert launched(surroundings() | MASTER | {"LWS_LEADER_ADDRESS": "lws-0.lws"}).source == "ray"
