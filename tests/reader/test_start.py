"""Starts told apart, ranks told apart, causes told from consequences."""

import pytest

from reader.document import document_of
from reader.scan import EARLIER_MAX, TURNS_MAX
from tests.reader.reading import read, scanned

BUDGET = (
    "[atom {t}] Memory budget: total_gpu=191.98GB, free=139.49GB, utilization=0.9,"
    " budget=172.79GB, peak_torch=40.00GB, non_torch=3.00GB, cudagraph_est=0.55GB, safety=3.84GB,"
    " available_for_kv={gib}GB, block_bytes=1056768, num_kvcache_blocks={n}\n"
)


def atom(*counts, t="08:00:01", gib="113.24"):
    return "".join(BUDGET.format(t=t, n=n, gib=gib) for n in counts)


def engine(version="0.11.0", pid=9, at="10:00:00", tp=1):
    return (
        f"(EngineCore_DP0 pid={pid}) INFO 01-01 {at} [core.py:77] Initializing a V1 LLM engine"
        f" (v{version}) with config: model='m', max_seq_len=4096, tensor_parallel_size={tp}\n"
    )


SIZE = "(EngineCore_DP0 pid=9) INFO 01-01 10:00:10 [k.py:1] GPU KV cache size: 40,000 tokens\n"
READY = "(APIServer pid=1) INFO:     Application startup complete.\n"
REQUEST = '(APIServer pid=1) INFO:     10.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK\n'
REFUSED = (
    "(EngineCore_DP0 pid=9) ERROR 01-01 10:00:10 [core.py:1] ValueError: No available memory for"
    " the cache blocks. Try increasing `gpu_memory_utilization`\n"
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above."
    " Failed core proc(s): {'EngineCore_DP0': 1}\n"
)


# --- starts -------------------------------------------------------------------------------------


def test_of_a_restart_loop_the_last_start_is_reported_and_the_others_are_counted():
    said = read((engine() + REFUSED) * 4)
    assert (said.restarts, said.alike) == (3, 3)
    assert said.code == "does_not_fit"


def test_a_start_that_works_after_others_failed_is_what_counts():
    said = read((engine() + REFUSED) * 2 + engine() + SIZE + READY)
    assert (said.status, said.restarts, said.alike) == ("agreed", 2, 0)


def test_a_start_that_fails_after_it_served_for_long_is_what_counts():
    said = read(engine() + SIZE + READY + REQUEST * 20_000 + engine(at="12:00:00") + REFUSED)
    assert (said.code, said.restarts) == ("does_not_fit", 1)


def test_more_new_starts_in_a_chunk_than_are_searched_for_apart_are_all_seen():
    said = read((engine() + SIZE + READY) * (TURNS_MAX * 3) + engine() + REFUSED)
    assert (said.code, said.restarts) == ("does_not_fit", TURNS_MAX * 3)


def test_only_the_latest_starts_are_kept():
    scan = scanned((engine() + REFUSED) * (EARLIER_MAX + 50))
    assert (scan.restarts(), len(scan.earlier())) == (EARLIER_MAX + 49, EARLIER_MAX)


def test_engines_of_several_dp_ranks_are_one_start():
    other = engine(pid=10).replace("DP0", "DP1")
    assert read(engine() + other + SIZE + READY).restarts == 0


def test_nameless_budgets_minutes_apart_are_of_two_starts():
    said = read(atom(7, 7) + atom(8, 8, t="08:05:00"))
    assert (said.restarts, said.numbers.value, len(said.numbers.rows)) == (1, 8, 2)


def test_what_requests_raise_is_no_failure_of_the_start():
    late = "(EngineCore_DP0 pid=9) ERROR 01-01 11:00:00 [x.py:1] ValueError: bad request\n"
    assert read(engine() + SIZE + READY + late).status == "agreed"


# --- ranks --------------------------------------------------------------------------------------


def test_nameless_ranks_of_several_files_are_different_ranks():
    said = read(atom(77), atom(77))
    assert (said.status, said.seats.world) == ("agreed", 2)


def test_nameless_ranks_of_several_containers_are_different_ranks():
    said = read("".join(f"atom-{n}  | {atom(70 + n)}" for n in range(2)))
    assert said.status == "disagreed"


def test_a_rank_that_its_wrapper_names_is_known():
    lines = atom(70, 70, 69).splitlines()
    said = read("".join(f"[1,{2 - n}]<stdout>:{line}\n" for n, line in enumerate(lines)))
    assert (said.numbers.binding, [row.label for row in said.numbers.rows]) == (
        (0,),
        ["rank 0", "rank 1", "rank 2"],
    )


def test_names_in_other_lines_say_how_many_nameless_ranks_there_are():
    names = "".join(f"[atom 08:00:00] Model Runner{n}/4: warmup_model 1 s\n" for n in range(4))
    assert read(names + atom(70, 70, 70, 70)).status == "agreed"
    said = read(names + atom(70, 70, 70))
    assert said.agreed.missing == ("the counts of 1 of 4 ranks",)


def test_ranks_and_layout_are_checked_and_not_believed():
    said = read(atom(70, 70), ranks=4)
    assert (said.agreed.word, said.numbers.value) == ("inconclusive", 70)
    said = read(engine(tp=2) + SIZE + READY, tp=4)
    assert "the log says tp=2, and tp=4 was expected" in said.notes


def test_dp_ranks_of_sglang_inside_tp_are_numbered_by_tp():
    line = "[2025-07-02 07:41:59 DP{n} TP{n}] KV Cache is allocated. #tokens: 100, KV size: 1 GB\n"
    said = read("".join(line.format(n=n) for n in range(4)))
    assert [row.rank for row in said.numbers.rows] == [0, 1, 2, 3]
    assert said.seats.world == 4


def test_dp_replicas_of_sglang_may_differ_and_stages_may_not():
    line = "[2025-07-02 07:41:59 {who}] KV Cache is allocated. #tokens: {n}, KV size: 1 GB\n"
    replicas = line.format(who="DP0 TP0", n=100) + line.format(who="DP1 TP0", n=90)
    assert read(replicas).agreed.why == "DP ranks differ, each agrees within itself"
    stages = line.format(who="PP0 TP0", n=100) + line.format(who="PP1 TP0", n=90)
    assert read(stages).agreed.word == "no"


def test_two_pools_of_a_rank_are_compared_with_the_same_pools_of_others():
    line = "[2025-07-02 07:41:59 TP{r}] KV Cache is allocated. #tokens: {n}, KV size: 1 GB\n"
    both = "".join(line.format(r=r, n=n) for n in (100, 400) for r in range(2))
    assert read(both).status == "agreed"
    assert read(both + line.format(r=0, n=7) + line.format(r=1, n=8)).status == "disagreed"


def test_counts_that_ray_folded_away_are_not_known():
    line = (
        "(RayWorkerWrapper pid=2) INFO 01-01 10:00:00 [n.py:1] Registering KV_Caches: num_blocks: 5"
    )
    said = read(f"{line} [repeated 7x across cluster]\n")
    assert "6 lines that Ray folded away: set RAY_DEDUP_LOGS=0" in said.agreed.missing


# --- numbers ------------------------------------------------------------------------------------


def test_who_binds_is_named_with_the_term_that_makes_it_tight():
    tight = atom(60, gib="93.24").replace("non_torch=3.00", "non_torch=23.00")
    said = read(atom(70) + tight + atom(70))
    assert said.numbers.binding == (1,)
    assert said.numbers.why_binding == "20.00 GiB more non_torch than the roomiest"
    assert [row.stranded_count for row in said.numbers.rows] == [10, 0, 10]
    assert said.numbers.rows[0].stranded_bytes == 10 * 1056768
    assert said.numbers.rows[0].stranded_gib == 20.0


def test_a_hundredth_of_a_gib_is_rounding_and_binds_nobody():
    said = read(atom(70, gib="113.24") + atom(70, gib="113.25"))
    assert [row.binds for row in said.numbers.rows] == [False, False]


@pytest.mark.parametrize("count", [0, -5])
def test_nothing_left_is_agreed_on_and_not_usable(count):
    said = read(atom(count, count))
    assert (said.agreed.word, said.usable.word, said.code) == ("yes", "no", "does_not_fit")


# --- causes -------------------------------------------------------------------------------------


def test_the_refusal_counts_before_exceptions_that_came_earlier():
    early = "ERROR 01-01 10:00:01 [x.py:1] ModuleNotFoundError: No module named 'flash'\n"
    assert read(engine() + early + REFUSED).code == "does_not_fit"


def test_a_warning_is_no_cause():
    warning = "WARNING 01-01 10:00:01 [x.py:1] ImportError: cannot import name 'y'\n"
    victim = "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause\n"
    said = read(engine() + warning + victim)
    assert (said.status, said.blame.first) == ("failed_no_cause_in_log", None)


def test_of_two_exceptions_the_one_that_a_victim_quotes_is_the_cause():
    log = (
        "(Worker_TP0 pid=1) ERROR 01-01 10:00:00 [a.py:1] TypeError: handled elsewhere\n"
        "(Worker_TP1 pid=2) ERROR 01-01 10:00:01 [a.py:1] IndexError: index 1 is out of bounds\n"
        "(EngineCore_DP0 pid=3) ERROR 01-01 10:00:02 [c.py:1] RuntimeError: Worker failed with"
        " error 'index 1 is out of bounds', please check the stack trace above for the root cause\n"
    )
    assert read(log).blame.ranks == (1,)


def test_an_exception_without_a_prefix_is_of_the_rank_whose_traceback_is_open():
    opened = "[2026-01-01 10:00:0{n} TP{r}] Scheduler hit an exception: Traceback (most recent call"
    raised = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    one = opened.format(n=0, r=3) + " last):\n"
    assert read(one + raised).blame.ranks == (3,)
    two = one + opened.format(n=1, r=1) + " last):\n"
    assert read(two + raised).blame.ranks == ()  # whose it is cannot be known


def test_files_are_put_in_the_order_of_their_times():
    late = "[rank1]: 2026-01-01 10:00:09 KeyError: 'b'\n"
    early = "[rank2]: 2026-01-01 10:00:03 KeyError: 'a'\n"
    assert read(late, early).blame.ranks == (2,)


@pytest.mark.parametrize(
    ("line", "code", "status"),
    [
        ("mpirun noticed that process rank 3 with PID 0 on node a exited on signal 9 (Killed).",
         "rank_lost", "failed_no_cause_in_log"),
        ("[atom 10:00:00] Engine Core: [ModelRunner2/4] proc died unexpectedly (exitcode=-9),"
         " shutting down.", "rank_lost", "failed_no_cause_in_log"),
        ("[2026-01-01 10:00:00] Scheduler or DataParallelController 1234 terminated with -9",
         "rank_lost", "failed_no_cause_in_log"),
        ("Container engine terminated, reason: OOMKilled", "rank_lost", "failed_no_cause_in_log"),
        ("ERROR: failed (exitcode: -9) local_rank: 1 (pid: 5) of binary: python", "rank_lost",
         "failed_no_cause_in_log"),
        ("ERROR: failed (exitcode: -15) local_rank: 1 (pid: 5) of binary: python", "rank_lost",
         "failed_no_cause_in_log"),
        ("RuntimeError: [1] is setting up NCCL communicator: Connection reset by peer",
         "rank_lost", "failed_no_cause_in_log"),
        ("RuntimeError: Timed out initializing process group in store based barrier on rank: 3,"
         " for key: k (world_size=8, worker_count=9, timeout=0:30:00)", "duplicate_rank", "failed"),
        ("torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2"
         " clients joined.", "ranks_missing", "failed"),
        ("DistNetworkError: The client socket has timed out after 600000ms while trying to connect"
         " to (10.0.0.1, 29500).", "ranks_missing", "failed"),
        ("RuntimeError: Ranks 1, 2 failed to pass monitoredBarrier in 300000 ms", "ranks_missing",
         "failed"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current"
         " value: mem_fraction_static=0.3", "does_not_fit", "failed"),
        ("RuntimeError: No enough gpu memory for kv cache.", "does_not_fit", "failed"),
        ("[TRT-LLM] [E] Failed to initialize executor on rank 3: Executor creation failed due to"
         " insufficient GPU memory.", "no_free_memory", "failed"),
    ],
)  # fmt: skip
def test_what_a_single_line_says(line, code, status):
    said = read(line + "\n")
    assert (said.code, said.status, document_of(said)["exit_code"]) == (code, status, 2)


def test_ranks_that_complain_came_and_when_those_are_all_the_rest_is_missing():
    line = (
        "RuntimeError: Timed out initializing process group in store based barrier on rank: {r},"
        " for key: k (world_size=4, worker_count=2, timeout=0:30:00)\n"
    )
    said = read(line.format(r=0) + line.format(r=3))
    assert (said.blame.missing, said.blame.victims) == ((1, 2), (0, 3))


def test_a_roomy_rank_that_complains_of_imbalance_is_not_blamed():
    line = (
        "[2026-01-01 10:00:00 TP1] RuntimeError: The memory capacity is unbalanced. Some GPUs may"
        " be occupied. min_per_gpu_memory=16.2, local_gpu_memory=46.8, x=1\n"
    )
    said = read(line, ranks=2)
    assert (said.code, said.blame.ranks) == ("spread_too_wide", (0,))


def test_a_log_that_ends_while_ranks_load_weights_is_inconclusive_and_says_who_is_behind():
    line = "[2026-01-01 10:00:0{n} TP{r}] Load weight {what}. avail mem=70.0 GB\n"
    log = "".join(line.format(n=0, r=r, what="begin") for r in range(2))
    said = read(log + line.format(n=9, r=1, what="end"))
    assert (said.status, said.behind, said.step) == ("inconclusive", (0,), "loading weights")


def test_an_empty_log_is_inconclusive():
    assert read("").status == "inconclusive"


def test_a_log_that_goes_on_for_minutes_without_a_word_of_the_start_shows_a_hang():
    begun = "[2026-01-01 10:00:00 TP0] Init torch distributed begin.\n"
    probe = '[2026-01-01 10:{m}:00] INFO:     10.0.0.1:1 - "GET /health HTTP/1.1" 503\n'
    said = read(begun + "".join(probe.format(m=m) for m in (10, 20)))
    assert (said.status, said.code, said.stall.at) == (
        "stalled",
        "ranks_missing",
        "torch.distributed",
    )
    assert read(begun + probe.format(m="01")).status == "inconclusive"


def test_a_core_that_a_signal_ended_is_no_consequence():
    line = (
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above."
    )
    said = read(f"{line} Failed core proc(s): {{'EngineCore_DP0': -9}}\n")
    assert (said.blame.text, said.code) == ("EngineCore_DP0 was ended by signal 9", "rank_lost")
    said = read(f"{line} Failed core proc(s): {{'EngineCore_DP0': 1}}\n")
    assert said.blame.first is None


def test_who_complains_of_a_collective_that_timed_out_is_a_victim():
    line = (
        "[rank{r}]:[E101 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective"
        " operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE) ran for 600029 milliseconds\n"
    )
    said = read("".join(line.format(r=r) for r in (0, 1, 3)))
    assert (said.status, said.blame.suspects) == ("failed_no_cause_in_log", (2,))


def test_a_slice_that_is_reported_as_the_whole_device_is_noted():
    said = read(atom(70) + atom(70).replace("total_gpu=191.98", "total_gpu=24.00"))
    assert "devices are unlike: 24.00 to 191.98 GiB in all" in said.notes
