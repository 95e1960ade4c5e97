"""A line without what containers and terminals put around it, and who wrote it."""

import json
import time

import pytest

from reader.engines import MARKS
from reader.lines import Stamp, clean, is_quiet, seat_in, stamp_in
from reader.scan import ALL, CALM, sights_in
from reader.sights import Seat
from tests.reader.fuzz import corpus

LINE = (
    "(Worker_TP1 pid=7) INFO 09-25 00:15:14 [gpu_worker.py:298] Available KV cache memory: 18 GiB"
)


@pytest.mark.parametrize(
    ("raw", "source"),
    [
        (LINE, ""),
        (f"2025-09-25T00:15:15.123456789Z stdout F {LINE}", ""),
        (f"2025-09-25T00:15:15.123+02:00 stderr P {LINE}", ""),
        (f"2025-09-25T00:15:15.123456789Z {LINE}", ""),
        (f"[pod/vllm-0/engine] {LINE}", "pod/vllm-0/engine"),
        (f"[pod/vllm-0/engine] 2025-09-25T00:15:15Z {LINE}", "pod/vllm-0/engine"),
        (f"engine-1  | {LINE}", "engine-1"),
        (f"vllm-openai_1 | \x1b[36m{LINE}\x1b[0m", "vllm-openai_1"),
        (f"\x1b[36mengine-1  |\x1b[0m {LINE}", "engine-1"),
        (f"[default3]:{LINE}", ""),
        (f"Sep 25 00:15:15 node-7 engine[4242]: {LINE}", ""),
        (json.dumps({"log": LINE + "\n", "stream": "stdout", "time": "2025-09-25T00:15:15Z"}), ""),
        (json.dumps({"message": LINE, "container_name": "engine"}), "engine"),
    ],
)
def test_wrappers_are_taken_off_and_say_who_wrote(raw, source):
    line = clean(raw.encode())
    assert (line.text, line.source) == (LINE, source)
    assert line.stamp == stamp_in(LINE)


@pytest.mark.parametrize(
    "text",
    [
        "INFO     | 2025-01-01 00:00:00 | module",
        "| 0  NVIDIA H200 |",
        '{"log": 3}',
        '{"log"',
        "[1,2] a list",
        " 50%|█████     | 1/2 [00:01<00:01]",
    ],
)
def test_what_only_looks_like_a_wrapper_stays(text):
    assert clean(text.encode()).text == text


def test_mpirun_and_srun_say_the_rank():
    assert clean(b"[1,3]<stdout>:[TensorRT-LLM][INFO] x").rank == 3
    assert clean(b"12: [TensorRT-LLM][INFO] x").rank == 12


@pytest.mark.parametrize(
    ("text", "seat"),
    [
        ("(VllmWorker rank=5 pid=2000) X", Seat(rank=5)),
        ("(VllmWorker TP3 pid=2000) X", Seat(axes=(("tp", 3),))),
        ("(Worker_TP1 pid=3) X", Seat(axes=(("tp", 1),))),
        ("(Worker_PP2_TP1 pid=3) X", Seat(axes=(("pp", 2), ("tp", 1)))),
        ("(Worker_DP1_TP0_EP2 pid=3) X", Seat(axes=(("dp", 1), ("tp", 0)))),
        ("(Worker_PP0_PCP1_DCP1_TP0 pid=3) X", Seat(axes=(("pp", 0), ("pcp", 1), ("tp", 0)))),
        ("(EngineCore_DP1 pid=3) X", Seat(axes=(("dp", 1),), engine=True)),
        ("(EngineCore_0 pid=3) X", Seat(axes=(("dp", 0),), engine=True)),
        ("(EngineCore pid=3) X", Seat(engine=True)),
        ("(APIServer pid=1) X", Seat(engine=True)),
        ("(RayWorkerWrapper pid=3487, ip=10.0.0.7) X", Seat(process="pid=3487 ip=10.0.0.7")),
        ("(EngineCore pid=1) (RayWorkerWrapper pid=2) X", Seat(process="pid=2")),
        ("(RolloutRayActor pid=1) (EngineCore pid=2) X", Seat(engine=True)),
        ("[2025-09-08 10:00:01 PP0] X", Seat(axes=(("pp", 0),))),
        ("[2025-09-08 10:00:01 DP3 TP7 EP7] X", Seat(axes=(("dp", 3), ("tp", 7)))),
        ("[10:00:01 TP2] X", Seat(axes=(("tp", 2),))),
        ("[gpu=3] X", Seat(axes=(("tp", 3),))),
        ("[rank11]: X", Seat(rank=11)),
        ("<node1>.nolog [stderr] [rank11]: X", Seat(rank=11)),
        ("[12/20/2025-04:21:50] [TRT-LLM] [RANK 2] [I] X", Seat(rank=2)),
        ("[12/20/2025-04:21:50] [TRT-LLM] [I] [2] X", Seat(rank=2)),
        ("[12/20/2025-04:21:50] [TRT-LLM] [I] X", Seat()),
        ("[atom 10:00:01] X", Seat()),
        ("49/51 [00:01<00:00, 26.29it/s](Worker_TP1 pid=214) X", Seat(axes=(("tp", 1),))),
        ("[2025-09-08 10:00:01] X", Seat()),
    ],
)
def test_the_writer_is_known_by_the_prefix(text, seat):
    assert seat_in(text, text.index("X")) == seat


def test_a_rank_that_a_text_only_mentions_did_not_write_it():
    text = "(Worker_TP1 pid=3) RuntimeError: worker died, it was (Worker_TP2 pid=4) on node 7"
    assert seat_in(text, text.index("RuntimeError")) == Seat(axes=(("tp", 1),))


@pytest.mark.parametrize(
    ("text", "stamp"),
    [
        ("[2025-01-02 10:00:01 TP0] x", Stamp(True, 2 * 86400 + 36001)),
        ("INFO 01-02 10:00:01 [x.py:1]", Stamp(True, 2 * 86400 + 36001)),
        ("[01/02/2025-10:00:01] [TRT-LLM]", Stamp(True, 2 * 86400 + 36001)),
        ("[rank3]:[E102 10:00:01.5 x.cpp:1]", Stamp(True, 2 * 86400 + 36001.5)),
        ("2025-01-02T10:00:01,250 x", Stamp(True, 2 * 86400 + 36001.25)),
        ("[atom 10:00:01] x", Stamp(False, 36001)),
        ("[2025-13-02 10:00:01] x", None),
        ("no time at all", None),
    ],
)
def test_a_time_is_the_log_s_own(text, stamp):
    assert stamp_in(text) == stamp


def test_times_with_and_without_a_date_are_not_compared():
    assert Stamp(True, 5.0).after(Stamp(False, 1.0)) is None
    assert Stamp(True, 5.0).after(Stamp(True, 1.0)) == 4.0


def test_the_level_stands_before_the_text_not_in_it():
    text = "(Worker_TP0 pid=1) ERROR 01-01 10:00:00 [x.py:1] RuntimeError: set NCCL_DEBUG=INFO"
    assert not is_quiet(text, text.index("RuntimeError"))
    assert is_quiet("WARNING 01-01 10:00:00 [x.py:1] ImportError: y", 32)


# --- the tables ---------------------------------------------------------------------------------


def lines_of_the_corpus():
    return [line for log in corpus() for line in log.replace(b"\r", b"\n").split(b"\n")]


def test_every_line_that_shows_something_is_found_in_raw_chunks():
    for raw in lines_of_the_corpus():
        if sights_in(clean(raw))[1]:
            assert any(needle in raw for needle in ALL), raw
        if sights_in(clean(raw), serving=True)[1]:
            assert any(needle in raw for needle in CALM), raw


def test_every_mark_is_shown_by_some_line():
    texts = [clean(raw).text for raw in lines_of_the_corpus()]
    assert [m.needles[0] for m in MARKS if not any(map(m.pattern.search, texts))] == []


@pytest.mark.parametrize(
    "nasty",
    [
        "A." * 8000,
        "a" * 16000 + "Error",
        "(Worker_TP1" * 1400,
        "x_" * 8000 + "Exception",
        "[repeated " * 1600,
        "Memory budget: total_gpu=" + "a=1, " * 3000,
        "\x1b[" * 8000,
        "KV size: " * 1700 + "GB",
        "(" * 16000,
        "max seq len (1) " * 1000,
        "Rank 1, 2, 3, " * 1100 + "failed to pass monitoredBarrier",
        "/a/torchelastic/role_info/1," * 580,
    ],
)
def test_no_text_takes_a_pattern_long(nasty):
    began = time.process_time()
    for prefix in ("", "RuntimeError: ", "wait timeout after 1ms, keys: "):
        line = clean((prefix + nasty).encode())
        for mark in MARKS:
            for found in mark.pattern.finditer(line.text):
                list(mark.sights(found))
        sights_in(line)
        seat_in(line.text, len(line.text))
    assert time.process_time() - began < 5  # milliseconds where no pattern backtracks
