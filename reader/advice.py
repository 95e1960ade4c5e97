"""What to do next: one command, in the engine's own words, resting on numbers of the log. Pure."""

from __future__ import annotations

from math import floor
from typing import NamedTuple

from reader.judge import Judgement
from reader.sights import Trouble

LAUNCH = {"vllm": "vllm serve …", "sglang": "python -m sglang.launch_server …"}
UTILIZATION_MIN = 0.1  # less of a device is no use to anybody
KERNEL_LOG = "dmesg -T | grep -iE 'killed process|out of memory'"


class Advice(NamedTuple):
    """A command, and the sentence that says why. Both "" where nothing need be done."""

    command: str
    why: str


def advice_of(judged: Judgement) -> Advice:
    if judged.status == "agreed":
        return Advice("", "")
    if judged.blame.first and not judged.start.ready:
        return _of_cause(judged, judged.blame.first.trouble)
    match judged.status:
        case "failed_no_cause_in_log":
            return _of_silence(judged)
        case "stalled":
            return _of_stall(judged)
        case "disagreed":
            return _of_difference(judged)
        case "failed":
            return _of_nothing_left(judged)
    if judged.start.hidden:
        why = "Ray folds lines of other ranks into one, and their counts are gone"
        return Advice("RAY_DEDUP_LOGS=0 and the same start", why)
    missing = (*judged.agreed.missing, *judged.usable.missing)
    first = missing[0] if missing else "the rest of the log"
    return Advice("kvaccord read LOG-OF-EVERY-RANK…", f"missing: {first}")


def _engine(judged: Judgement, option: str) -> str:
    return f"{LAUNCH.get(judged.engine, 'the same start with')} {option}"


def _of_cause(judged: Judgement, trouble: Trouble) -> Advice:
    facts = dict(trouble.facts)
    match trouble.code:
        case "request_exceeds_free" if "free_gib" in facts:
            return _of_too_little_free(judged)
        case "does_not_fit" if "fits_model_len" in facts:
            return _of_length(judged, facts)
        case "state_floor_exceeds_budget" if "fits_num_seqs" in facts:
            seqs = int(float(facts["fits_num_seqs"]))
            why = (
                f"there are {seqs} state slots at this start's max_model_len; a sequence takes one"
            )
            return Advice(_engine(judged, f"--max-num-seqs {seqs}"), why)
        case "does_not_fit" | "state_floor_exceeds_budget" | "no_free_memory":
            return _of_nothing_left(judged)
        case "spread_too_wide":
            return _of_imbalance(facts)
        case "duplicate_rank":
            why = "end what is left of the other start, or give each start a store of its own"
            return Advice("ps -eo pid,lstart,args", why)
        case "ranks_missing":
            return _of_missing(facts)
        case "rank_lost":
            return Advice(
                KERNEL_LOG,
                "the process went without an exception: SIGKILL is nearly always the host's"
                " out-of-memory killer; look at host memory and container limits, not at the GPU",
            )
    return _of_exception(judged, trouble)


def _of_exception(judged: Judgement, trouble: Trouble) -> Advice:
    first = judged.blame.first
    file, line = (first.place.file, first.place.line) if first else ("LOG", 1)
    if port := dict(trouble.facts).get("port"):
        why = (
            "another engine or a process that was left over owns the port; memory has no part in it"
        )
        return Advice(f"ss -ltnp 'sport = :{int(float(port))}'", why)
    if first and first.during == "initialize_from_config" and trouble.text.startswith("KeyError"):
        return Advice(
            f"grep -n rank {file} | head -n 100",
            "workers look up layers that they do not own: they took the KV plan of another stage."
            " See that the rank a worker reports is its final one, not the order of its creation",
        )
    if "out of memory" in trouble.text or "OutOfMemory" in trouble.text:
        why = "see who else holds memory on that device; then lower the engine's share"
        return Advice("nvidia-smi", why)
    return Advice(f"sed -n '{max(1, line - 40)},{line}p' {file}", "the traceback of the exception")


def _of_too_little_free(judged: Judgement) -> Advice:
    """The tightest device decides. Rounded down: 19.77 of 22.05 is 0.8965, and 0.90 fails again."""
    all_facts = [
        dict(seen.trouble.facts)
        for seen in judged.start.troubles
        if seen.trouble.code == "request_exceeds_free"
    ]
    facts = min(all_facts, key=lambda f: float(f["free_gib"]) / max(float(f["total_gib"]), 0.01))
    free, total = float(facts["free_gib"]), float(facts["total_gib"])
    fits = floor(free / total * 100 + 1e-9) / 100 if total > 0 else 0.0
    if fits < UTILIZATION_MIN:
        return Advice("nvidia-smi", f"{free:.2f} of {total:.2f} GiB are free: see who has the rest")
    short = float(facts["wanted_gib"]) - free
    why = f"{short:.2f} GiB are missing (within rounding); {fits:.2f} is what is free, rounded down"
    return Advice(_engine(judged, f"--gpu-memory-utilization {fits:.2f}"), why)


def _of_length(judged: Judgement, facts: dict[str, float | str]) -> Advice:
    """Every limit that is broken at once, so that the next start does not fail at the second."""
    length, wanted = int(float(facts["fits_model_len"])), int(float(facts["max_model_len"]))
    option = f"--max-model-len {length}"
    why = f"a request of {wanted} tokens does not fit; one of {length} does, by the engine's word"
    for seen in judged.blame.others:
        if seqs := dict(seen.trouble.facts).get("fits_num_seqs"):
            option += f" --max-num-seqs {int(float(seqs))}"
    if length <= 0:
        return _of_nothing_left(judged)
    return Advice(_engine(judged, option), why)


def _of_nothing_left(judged: Judgement) -> Advice:
    takes = [
        (row.facts["weights_gib"], row.label)
        for row in judged.numbers.rows
        if "weights_gib" in row.facts
    ]
    why = f"weights take {max(takes)[0]:.2f} GiB on {max(takes)[1]}; " if takes else ""
    match judged.engine:
        case "sglang":
            asked = judged.start.facts.get("utilization")
            now = f" (now {asked:g})" if asked else ""
            why += f"raise --mem-fraction-static{now}, or spread the weights"
            why += " over more ranks (--tp-size)"
            return Advice("nvidia-smi", why)
        case "vllm":
            why += (
                "see who holds the rest; then raise --gpu-memory-utilization, or spread the weights"
            )
            return Advice("nvidia-smi", f"{why} over more ranks (-tp)")
        case "atom":
            return Advice(
                "rocm-smi --showmeminfo vram",
                f"{why}see what is held beside the engine; then lower --max-num-seqs or"
                " --max-num-batched-tokens, or raise --gpu-memory-utilization",
            )
        case "lmdeploy":
            why += "see what is free; then raise --cache-max-entry-count or --tp"
            return Advice("nvidia-smi", why)
    return Advice("nvidia-smi", f"{why}see what is free on each device")


def _of_imbalance(facts: dict[str, float | str]) -> Advice:
    if "least_gib" not in facts:
        why = "the line has no rank and no numbers: see which device has least free"
        return Advice("nvidia-smi", why)
    least, own = float(facts["least_gib"]), float(facts["own_gib"])
    why = f"a short rank has {least:.2f} GiB free, the roomy one that complains has {own:.2f}"
    return Advice("nvidia-smi", why)


def _of_missing(facts: dict[str, float | str]) -> Advice:
    if facts.get("run_id") == "none":
        why = "run id 'none' is torchrun's default, so two launches may share one namespace"
        return Advice("torchrun --rdzv-id UNIQUE …", why)
    return Advice(
        'getent hosts "$MASTER_ADDR"',
        "run it where the missing ranks should be: name resolution, firewall, network interface;"
        " nobody got as far as memory",
    )


def _of_silence(judged: Judgement) -> Advice:
    stamp = next((seen.stamp for seen in judged.blame.consequences if seen.stamp), None)
    before = f", before {_clock(stamp.s)}" if stamp else ""
    if suspects := judged.blame.suspects:
        logs = " ".join(f"LOG-OF-RANK-{rank}" for rank in suspects[:4])
        why = f"the first cause is in the log of another rank{before}"
        return Advice(f"kvaccord read {logs}", why)
    return Advice(
        KERNEL_LOG,
        "a process went without an exception: exit 137 or signal 9 is nearly always the host's"
        " out-of-memory killer; look at host memory and container limits",
    )


def _clock(s: float) -> str:
    day = int(s) % 86400
    return f"{day // 3600:02}:{day % 3600 // 60:02}:{day % 60:02}"


def _of_stall(judged: Judgement) -> Advice:
    when = "later than the KV plan (compile, graph capture)"
    if judged.numbers.value is None:
        when = "before the KV plan: no worker got as far as memory profiling"
    return Advice(
        "py-spy dump --pid PID",
        f"run it on every worker: the hang is {when}, so memory has no part in it",
    )


def _of_difference(judged: Judgement) -> Advice:
    value, unit = judged.numbers.value, judged.numbers.unit
    why = f"every rank then has {value} {unit}"
    if judged.engine == "sglang" and unit == "tokens":
        return Advice(_engine(judged, f"--max-total-tokens {value}"), why)
    if judged.engine == "vllm" and unit == "blocks":
        return Advice(_engine(judged, f"--num-gpu-blocks-override {value}"), why)
    why = f"all ranks must use {value} {unit}: let them agree before they allocate"
    return Advice("kvaccord read LOG… --replay start.json", why)
