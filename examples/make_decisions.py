"""Makes examples/decisions/: a decision or outcome for every code, by the coordinator's own rules.

    .venv/bin/python -m examples.make_decisions

A test compares them with what the rules give today. Each is one small start of two ranks, but for
the one whose plan is too large.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from coordinator.commands import Cancel, Claim, Sign, Spend
from coordinator.policy import Policy
from kvaccord import Layout, page, state
from kvaccord.decision import Decision, Outcome
from tests.builders import Log, a_join, a_launch, a_report

FOLDER = Path(__file__).parent / "decisions"

Story = Callable[[Log], object]


def reported(**changes: Any) -> Story:
    """Both ranks report; the second one with these changes."""

    def story(log: Log) -> None:
        first, second = log.start(2)
        shared = {k: v for k, v in changes.items() if k in ("classes", "max_num_seqs")}
        first.reports(a_report(90, **shared))
        second.reports(a_report(70, **changes))

    return story


def after(*, passed: bool, then: Callable[[Log, Any], object]) -> Story:
    """Something happens to rank 1, before or after both have reported."""

    def story(log: Log) -> None:
        _, second = log.passed(90, 70) if passed else log.start(2)
        then(log, second)
        if log.engine.rounds[1].open:
            log.spends("grace", 1)

    return story


def is_lost(_: Log, process: Any) -> None:
    process.is_suspected()
    process.is_lost()


def is_replaced(log: Log, process: Any) -> None:
    process.is_suspected()
    log.claimed(1, layout=process.join.layout)


def is_doubled(log: Log, process: Any) -> None:
    log.claimed(1, layout=process.join.layout, host="host-9")


def is_overtaken(log: Log, process: Any) -> None:
    log.claimed(1, layout=process.join.layout, launch=a_launch(restart=1))


def is_stuck(what: Any) -> Callable[[Log, Any], object]:
    sign = Sign("loading weights", 412.0, stuck=True)
    return lambda log, _: log.do(Spend(1, what, signs={1: sign}))


def too_wide(log: Log) -> None:
    processes = [log.joined(a_join(rank, layout=a_pair())) for rank in range(2)]
    for process in processes:
        log.do(Claim(process.attempt, Policy(spread_limit=0.1)))
    for process, pages in zip(processes, (90, 70), strict=True):
        process.reports(pages)


def too_large(log: Log) -> None:
    """Replicas by the hundred, each with other entries and classes of the longest names."""
    replicas = log.start(120, layout=Layout(dp=120))
    for rank, process in enumerate(replicas):
        classes = [state(f"{'s' * 60}{n}", 1000 + rank, entries_per_req=1) for n in range(31)]
        process.reports(
            a_report(90_000, classes=[page("kv", 1000 + rank), *classes], max_num_seqs=2)
        )


EITHER: dict[str, Callable[[Log, Any], object]] = {
    "rank_left": lambda _, process: process.leaves("scaled down"),
    "rank_lost": is_lost,
    "rank_replaced": is_replaced,
    "duplicate_rank": is_doubled,
    "superseded": is_overtaken,
    "cancelled": lambda log, _: log.do(Cancel(1, "the wrong image was rolled out")),
}

FAILED: dict[str, Story] = {
    "reserve_exceeds_free": reported(reserve_bytes=10**6),
    "no_free_memory": reported(free_bytes=0),
    "request_exceeds_free": reported(requested_bytes=200_000, initial_free_bytes=150_000),
    "state_floor_exceeds_budget": reported(
        classes=[page("kv", 1000), state("mamba", 40_000, entries_per_req=1)], max_num_seqs=2
    ),
    "does_not_fit": reported(classes=[page("kv", 1000, min_entries=80)]),
    "inputs_disagree": reported(inputs={"dtype": "fp8"}),
    "implausible_report": reported(free_bytes=0, total_bytes=200_000),
    "rank_vetoed": after(
        passed=False, then=lambda _, p: p.vetoes("OutOfMemoryError: tried to allocate 2.00 GiB")
    ),
    "ranks_missing": lambda log: (log.claimed(0, layout=a_pair()), log.spends("gather")),
    "spread_too_wide": too_wide,
    "plan_too_large": too_large,
    "rank_stuck": lambda log: (log.start(2)[0].reports(90), is_stuck("report")(log, None)),
    **{code: after(passed=False, then=then) for code, then in EITHER.items()},
}

ABORTED: dict[str, Story] = {
    "apply_failed": after(passed=True, then=lambda _, p: p.fails_to_build("hipMalloc failed")),
    "applied_differently": after(passed=True, then=lambda _, p: p.applies({"kv": 60})),
    "ranks_missing": lambda log: (log.passed(90, 70)[0].applies(), log.spends("apply")),
    "rank_stuck": lambda log: (log.passed(90, 70)[0].applies(), is_stuck("apply")(log, None)),
    **{code: after(passed=True, then=then) for code, then in EITHER.items()},
}


def a_pair() -> Layout:
    return Layout(tp=2)


def documents() -> dict[str, bytes]:
    """{file name: bytes}. Raises where a story no longer ends as it says."""
    made: dict[str, bytes] = {}
    log = Log()
    log.sealed(90, 70)
    made["passed_agreed.json"] = log.decision.body
    made["sealed.json"] = log.outcome.body
    for code, story in FAILED.items():
        log = Log()
        story(log)
        decision = Decision(log.engine.rounds[1].decision)
        if (decision.result, decision.code) != ("FAILED", code):
            raise ValueError(f"the story of {code} ends as {decision.sentence}")
        made[f"failed_{code}.json"] = decision.body
    for code, story in ABORTED.items():
        log = Log()
        story(log)
        outcome = Outcome(log.engine.rounds[1].outcome)
        if (outcome.result, outcome.code) != ("ABORTED", code):
            raise ValueError(f"the story of {code} ends as {outcome.sentence}")
        made[f"aborted_{code}.json"] = outcome.body
    return made


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    made = documents()
    for path in FOLDER.glob("*.json"):
        if path.name not in made:
            path.unlink()
    for name, body in made.items():
        (FOLDER / name).write_bytes(body)
    print(f"{len(made)} documents in {FOLDER}")


if __name__ == "__main__":
    main()
