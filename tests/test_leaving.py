"""How a process ends its part unasked: at exit, over a fork, told while it is stuck."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager

import pytest

from kvaccord.errors import Failed, Invalid
from tests.fake_coordinator import REPORT, WAITING, a_decision, an_outcome, fake_coordinator
from tests.wire import an_engine
from worker_client import Rendezvous

HEADER = """
import os, sys, threading, time
from tests.fake_coordinator import REPORT
from worker_client import Exit, Rendezvous
url = sys.argv[1]
"""


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in os.environ:
        if name.startswith(("KVACCORD_", "TORCHELASTIC_", "SLURM_", "MASTER_")):
            monkeypatch.delenv(name)


@pytest.fixture
def server():
    with fake_coordinator() as server:
        yield server


def script(code, *args):
    code = HEADER + textwrap.dedent(code)
    return [sys.executable, "-W", "error", "-c", code, *map(str, args)]


def run(code, *args):
    return subprocess.run(script(code, *args), capture_output=True, text=True, timeout=30)


@contextmanager
def running(code, *args):
    process = subprocess.Popen(
        script(code, *args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate()


# A process that ends without a word


def test_an_exception_that_nobody_catches_is_a_veto_with_its_cause(server):
    ended = run(
        """
        held = Rendezvous.join(url=url, engine="e", ranks=[0])
        try:
            raise MemoryError("2.00 GiB do not fit")
        except MemoryError as first:
            raise RuntimeError("loading failed") from first
        """,
        server.url,
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("RuntimeError: loading failed\n")
    veto = server.said("veto")
    assert veto["text"] == "MemoryError: 2.00 GiB do not fit"
    assert "RuntimeError: loading failed" in veto["trace"]


@pytest.mark.parametrize("last", ["sys.exit(3)", "pass"])
def test_the_end_of_a_program_that_has_not_left_is_said(server, last):
    ended = run(f"held = Rendezvous.join(url=url, engine='e', ranks=[0])\n{last}", server.url)
    assert ended.returncode == (3 if "exit" in last else 0)
    assert ended.stderr == ""
    assert server.said("leave") == {"reason": "the process ended without leaving the rendezvous"}


def test_a_verdict_that_nobody_catches_is_no_cause_of_this_rank(server):
    server.answers["reports"] = (200, a_decision("FAILED"))
    run("Rendezvous.join(url=url, engine='e', ranks=[0]).report(REPORT)", server.url)
    assert server.words() == ["join", "claim", "reports", "leave"]


def test_a_process_that_was_sealed_or_has_left_says_nothing_more_at_exit(server):
    ended = run(
        """
        rdzv = Rendezvous.join(url=url, engine="e", ranks=[0])
        rdzv.applied(built=rdzv.report(REPORT).entries)
        other = Rendezvous.join(url=url, engine="e", ranks=[0])
        other.leave("scaled down")
        """,
        server.url,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert server.words().count("leave") == 1


def test_an_object_that_is_dropped_is_still_said_goodbye_for(server):
    run("Rendezvous.join(url=url, engine='e', ranks=[0])\nimport gc; gc.collect()", server.url)
    assert server.words()[-1] == "leave"


# Forks


def test_a_forked_child_does_not_hide_the_death_of_its_parent(server):
    code = """
        held = Rendezvous.join(url=url, engine="e", ranks=[0])
        if os.fork() == 0:
            os.close(1), os.close(2)
            time.sleep(5)
            os._exit(0)
        print("ready", flush=True)
        time.sleep(20)
        """
    with running(code, server.url) as parent:
        assert server.attached.acquire(timeout=5.0)
        parent.send_signal(signal.SIGKILL)
        assert server.ended.acquire(timeout=1.0)


def test_a_forked_child_is_refused_and_ends_without_a_word(server):
    ended = run(
        """
        with Rendezvous.join(url=url, engine="e", ranks=[0]) as rdzv:
            child = os.fork()
            if child == 0:
                for call in (lambda: rdzv.report(REPORT), lambda: rdzv.phase("x"), rdzv.leave):
                    try:
                        call()
                    except Exception as fault:
                        print(type(fault).__name__, "forked child" in str(fault), flush=True)
                sys.exit(0)  # through the end of the block, and atexit
            os.waitpid(child, 0)
            rdzv.applied(built=rdzv.report(REPORT).entries)
        """,
        server.url,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "Invalid True\n" * 3
    assert server.words() == ["join", "claim", "reports", "applied"]


def test_a_forked_child_may_join_as_a_process_of_its_own(server):
    ended = run(
        """
        held = Rendezvous.join(url=url, engine="e", ranks=[0])
        child = os.fork()
        if child == 0:
            with Rendezvous.join(url=url, engine="e", ranks=[0]) as own:
                own.applied(built=own.report(REPORT).entries)
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        held.leave()
        """,
        server.url,
    )
    assert (ended.stdout, ended.stderr) == ("7\n", "")


# Two at once


def test_a_second_thread_is_refused_by_name_while_a_call_runs(server):
    server.answers["reports"] = (202, WAITING)
    rdzv = Rendezvous.join(url=server.url, engine="e", ranks=[0])
    ended = []

    def report():
        with pytest.raises(Failed) as failed:
            rdzv.report(REPORT)
        ended.append(failed.value)

    first = threading.Thread(target=report)
    first.start()
    while "reports" not in server.words():
        time.sleep(0.01)
    for call in (lambda: rdzv.report(REPORT), lambda: rdzv.applied(built={})):
        with pytest.raises(Invalid, match=r"while report\(\) runs in thread"):
            call()
    rdzv.phase("profile", 3)  # any thread may
    server.push("decision", a_decision("FAILED").body)
    first.join(5.0)
    assert len(ended) == 1
    rdzv.close()


def test_the_cause_is_said_though_another_thread_stands_in_a_call(server):
    server.answers["reports"] = (202, WAITING)
    ended = []

    def report(rdzv):
        with pytest.raises(Failed) as failed:
            rdzv.report(REPORT)
        ended.append(failed.value)

    rdzv = Rendezvous.join(url=server.url, engine="e", ranks=[0])
    waits = threading.Thread(target=report, args=(rdzv,))
    waits.start()
    while "reports" not in server.words():
        time.sleep(0.01)
    server.answers["reports"] = (200, a_decision("FAILED"))
    with pytest.raises(RuntimeError), rdzv:
        raise RuntimeError("the real cause")
    assert server.said("veto")["text"] == "RuntimeError: the real cause"
    waits.join(5.0)
    assert len(ended) == 1


def test_a_signal_handler_may_leave_in_the_middle_of_a_call(server):
    server.answers["reports"] = (202, WAITING)
    ended = run(
        """
        import signal
        rdzv = Rendezvous.join(url=url, engine="e", ranks=[0])
        signal.signal(signal.SIGALRM, lambda *_: (rdzv.leave("told to"), sys.exit(4)))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        rdzv.report(REPORT)
        """,
        server.url,
    )
    assert (ended.returncode, ended.stderr) == (4, "")
    assert server.said("leave") == {"reason": "told to"}


def test_after_its_end_a_rendezvous_is_not_used_again(server):
    rdzv = Rendezvous.join(url=server.url, engine="e", ranks=[0])
    rdzv.leave()
    with pytest.raises(Invalid, match="not joined twice"):
        rdzv.report(REPORT)
    rdzv.phase("late")  # says nothing, and disturbs nobody
    assert server.words() == ["join", "claim", "leave"]


# on_stop


def told_while_stuck(server, code, *args):
    with running(code, server.url, *args) as process:
        assert server.attached.acquire(timeout=5.0)
        began_s = time.monotonic()
        server.push("decision", a_decision("FAILED", verdict=VETOED).body)
        code = process.wait(10.0)
        took_s = time.monotonic() - began_s
        return code, took_s, process.stderr.read()


VETOED = {
    "outcome": "FAILED",
    "code": "rank_vetoed",
    "message": "rank 2 on h2: MemoryError: 2.00 GiB do not fit",
    "ranks": [2],
    "causes": [],
    "retryable": True,
}
STUCK = """
    rdzv = Rendezvous.join(url=url, engine="e", ranks=[0], on_stop=Exit(0.3))
    def load_weights():
        print("ready", flush=True)
        time.sleep(30)
    load_weights()
    """


def test_exit_ends_a_stuck_process_with_the_cause_and_the_stacks(server):
    code, took_s, said = told_while_stuck(server, STUCK)
    assert code == 75
    assert 0.3 <= took_s < 3.0
    first, *rest = said.splitlines()
    assert first == (
        "kvaccord: default/e round 7 FAILED rank_vetoed: rank 2 on h2: MemoryError: 2.00 GiB do not"
        " fit; this process ends within 0.3 s"
    )
    assert "in load_weights" in "\n".join(rest)


@pytest.mark.parametrize(
    ("how", "retryable", "code"),
    [("Exit(0)", False, 70), ("Exit(0, code=9)", True, 9)],
)
def test_the_exit_code_says_whether_to_repeat_unless_it_is_given(
    server, monkeypatch, how, retryable, code
):
    monkeypatch.setitem(VETOED, "retryable", retryable)
    assert told_while_stuck(server, STUCK.replace("Exit(0.3)", how))[0] == code


def test_exit_lets_a_process_end_by_itself_that_hears_in_time(server):
    code, took_s, said = told_while_stuck(
        server,
        """
        rdzv = Rendezvous.join(url=url, engine="e", ranks=[0], on_stop=Exit(20))
        print("ready", flush=True)
        while True:
            time.sleep(0.05)
            try:
                rdzv.phase("load", 1)
            except Exception as fault:
                print(fault)
                sys.exit(5)
        """,
    )
    assert code == 5
    assert took_s < 3.0
    assert "exits with" not in said


def test_exit_ends_a_process_that_heard_it_and_then_hangs_while_it_goes(server):
    server.answers["reports"] = (200, a_decision("FAILED"))
    ended = run(
        """
        with Rendezvous.join(url=url, engine="e", ranks=[0], on_stop=Exit(0.3)) as rdzv:
            try:
                rdzv.report(REPORT)
            finally:
                time.sleep(30)
        """,
        server.url,
    )
    assert ended.returncode == 75
    assert "FAILED" in ended.stderr


def test_exit_ends_a_process_that_objected_itself_and_hangs_after_those_whom_it_told(server):
    ended = run(
        """
        try:
            with Rendezvous.join(url=url, engine="e", ranks=[0], on_stop=Exit(0.3)):
                raise MemoryError("2.00 GiB do not fit")
        finally:
            time.sleep(30)
        """,
        server.url,
    )
    assert ended.returncode == 75
    said = "this process objected: MemoryError: 2.00 GiB do not fit; this process ends within 0.8 s"
    assert said in ended.stderr


def test_exit_ends_a_process_that_hangs_after_python_has_let_go_of_its_threads(server):
    server.answers["reports"] = (200, a_decision("FAILED"))
    began_s = time.monotonic()
    ended = run(
        """
        class Pool:
            def __del__(self, sleep=time.sleep):
                sleep(25)  # as libraries do that wait for their peers while they are torn down

        pool = Pool()
        with Rendezvous.join(url=url, engine="e", ranks=[0], on_stop=Exit(1)) as rdzv:
            rdzv.report(REPORT)
        """,
        server.url,
    )
    assert time.monotonic() - began_s < 20.0
    assert ended.returncode == 1
    assert "kvaccord: default/e round 7 FAILED rank_vetoed" in ended.stderr


def test_a_process_that_joins_again_is_not_ended_for_its_former_round(server):
    answers = iter([(200, a_decision("FAILED")), (200, a_decision())])
    server.answers["reports"] = lambda: next(answers)
    ended = run(
        """
        try:
            with Rendezvous.join(url=url, engine="e", ranks=[0], on_stop=Exit(1)) as rdzv:
                rdzv.report(REPORT)
        except Exception:
            pass
        with Rendezvous.join(url=url, engine="e", ranks=[0], on_stop=Exit(1)) as rdzv:
            rdzv.applied(built=rdzv.report(REPORT).entries)
        time.sleep(1.5)
        print("serves")
        """,
        server.url,
    )
    assert (ended.returncode, ended.stdout) == (0, "serves\n")


def test_a_rank_that_was_never_told_does_not_end_by_itself(server):
    server.answers["reports"] = (202, WAITING)
    ended = run(
        """
        try:
            with Rendezvous.join(
                url=url, engine="e", ranks=[0], on_stop=Exit(0), patience_s=0.3
            ) as rdzv:
                rdzv.report(REPORT)
        except Exception as fault:
            time.sleep(0.5)
            print(type(fault).__name__)
        """,
        server.url,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "NoVerdict\n", "")


@pytest.mark.parametrize("broken", [False, True])
def test_a_callback_is_told_once_in_a_thread_of_its_own(server, broken, caplog):
    told, heard = [], threading.Event()

    def on_stop(document):
        told.append((document, threading.current_thread().name))
        heard.set()
        if broken:
            raise RuntimeError("not now")

    rdzv = Rendezvous.join(url=server.url, engine="e", ranks=[0], on_stop=on_stop)
    server.push("decision", a_decision("FAILED").body)
    assert heard.wait(5.0)
    with pytest.raises(Failed), rdzv:
        rdzv.report(REPORT)
    assert told == [(a_decision("FAILED"), "kvaccord-stop")]


def test_an_abort_while_the_pools_are_built_is_told_too(server):
    told, heard = [], threading.Event()
    rdzv = Rendezvous.join(
        url=server.url,
        engine="e",
        ranks=[0],
        on_stop=lambda document: (told.append(document), heard.set()),
    )
    rdzv.report(REPORT)
    server.push("outcome", an_outcome("ABORTED").body)
    assert heard.wait(5.0)
    assert told == [an_outcome("ABORTED")]
    rdzv.close()


def test_on_stop_must_be_something_that_can_be_done(server):
    with pytest.raises(Invalid, match="on_stop is 'explode'"):
        Rendezvous.join(url=server.url, engine="e", ranks=[0], on_stop="explode")
    assert server.told == []


# With a real coordinator

FOUR = """
    import ctypes
    from kvaccord import Layout, Report, page
    rank = int(sys.argv[3])
    with Rendezvous.join(
        url=url, engine=sys.argv[2], ranks=[rank], layout=Layout(tp=4), launch="run-1",
        on_stop=Exit(1),
    ) as rdzv:
        print("ready", flush=True)
        if rank == 2:
            time.sleep(1.0)
            raise MemoryError("2.00 GiB do not fit")
        if rank == 3:
            ctypes.CDLL(None).sleep(600)  # as in a collective: no signal, no exception gets in
        time.sleep(600)
    """


def test_when_one_of_four_raises_the_stuck_others_are_gone_within_5_s_with_its_words(url):
    engine = an_engine()
    processes = [
        subprocess.Popen(
            script(FOUR, url, engine, rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        began_s = time.monotonic()
        said = [process.communicate(timeout=10.0)[1] for process in processes]
        assert time.monotonic() - began_s < 1.0 + 5.0
        assert [process.returncode for process in processes] == [75, 75, 1, 75]
        assert all("MemoryError: 2.00 GiB do not fit" in text for text in said)
        assert all("rank_vetoed: rank 2 on " in said[rank].splitlines()[0] for rank in (0, 1, 3))
    finally:
        for process in processes:
            process.kill()
            process.communicate()


BUSY = """
    import ctypes
    from kvaccord import Layout, Report, page
    rank = int(sys.argv[3])
    with Rendezvous.join(
        url=url, engine=sys.argv[2], ranks=[rank], layout=Layout(tp=2), launch="run-1"
    ) as rdzv:
        if rank == 1:
            # PyDLL keeps the GIL: no thread of this process runs.
            ctypes.PyDLL(None).sleep(int(sys.argv[4]))
        report = Report(free_bytes=1000, kv_budget_bytes=900, classes=[page("kv", 100)])
        agreed = rdzv.report(report)
        rdzv.applied(built=agreed.entries)
        print(agreed.entries["kv"])
    """


@pytest.mark.parametrize("for_s", [5, pytest.param(60, marks=pytest.mark.nightly)])
def test_a_rank_whose_c_call_holds_the_gil_is_not_lost(for_s):
    from tests.wire import serving

    with serving("--report-s", "90", "--lost-after-s", "2") as coordinator:
        engine = an_engine()
        processes = [
            subprocess.Popen(
                script(BUSY, coordinator.url, engine, rank, for_s),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        heard = [process.communicate(timeout=for_s + 30.0) for process in processes]
        assert heard == [("9\n", "")] * 2
