"""What a seed makes of a world: sizes, memory, policies, and who will misbehave. Chance, no I/O."""

from __future__ import annotations

from random import Random
from typing import Any

from coordinator.policies import Policies
from coordinator.policy import Ends, Policy
from coordinator.service import Settings
from kvaccord import Layout, Report, page, state
from kvaccord.layout import Groups
from kvaccord.messages import AskedBudgets, AskedEnds
from tests.simulation.machines import Script
from tests.simulation.net import Weather
from tests.simulation.store import Mood

SMALL = [Layout(tp=2), Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(dp=2, equal_over=("dp",))]
MIDDLE = [Layout(tp=4), Layout(tp=3), Layout(dp=2, tp=2), Layout(pp=2, pcp=2), Layout(pp=4)]
LARGE = [Layout(tp=8), Layout(dp=2, pp=2, tp=2), Layout(dp=4, tp=2, equal_over=("dp",))]
HUGE = [Layout(tp=8, pp=2), Layout(dp=4, tp=8), Layout(dp=2, pp=2, pcp=2, tp=8)]


def a_mode(rng: Random) -> str:
    """calm: nothing goes wrong outside. safety: faults to the end. liveness: they end."""
    return rng.choices(["calm", "safety", "liveness"], [1, 4, 5])[0]


def a_layout(rng: Random) -> Layout:
    return rng.choice(rng.choices([SMALL, MIDDLE, LARGE, HUGE], [62, 28, 7, 3])[0])


def some_groups(rng: Random, layout: Layout) -> dict[int, Groups] | None:
    """Attention DP inside TP, say: the layout only numbers the ranks, and each names its groups."""
    world = layout.world_size
    if rng.random() > 0.1 or layout.equal_over:
        return None
    size = rng.choice([n for n in range(1, world + 1) if world % n == 0])
    within = rng.choice([n for n in range(1, size + 1) if size % n == 0])
    return {r: Groups(budget=f"b{r // within}", scheduler=f"s{r // size}") for r in range(world)}


def some_budgets(rng: Random) -> AskedBudgets | None:
    """What a join asks for: shorter than the policy, or longer, which changes nothing."""
    if rng.random() > 0.12:
        return None
    return AskedBudgets(
        gather_s=rng.choice([None, 7.0, 500.0]),
        report_s=rng.choice([None, AskedEnds(hard=9.0), AskedEnds(soft=4.0)]),
        apply_s=rng.choice([None, AskedEnds(hard=6.0), AskedEnds(soft=3.0, hard=7.0)]),
    )


def some_settings(rng: Random) -> Settings:
    gather_s = rng.choice([8.0, 20.0, 60.0])
    report_s, apply_s = rng.choice([10.0, 30.0]), rng.choice([8.0, 30.0])
    policy = Policy(
        gather_s=gather_s,
        report_s=Ends(soft=report_s * rng.choice([0.5, 1.0]), hard=report_s),
        apply_s=Ends(soft=apply_s * rng.choice([0.5, 1.0]), hard=apply_s),
        stall_s=rng.choice([4.0, 20.0]),
        spread_limit=rng.choice([None, None, 0.3]),
        keep_rounds=rng.choice([1, 2, 50]),
    )
    lost_after_s = rng.choice([4.0, 8.0, 30.0])
    return Settings(
        policies=Policies(policy),
        lost_after_s=lost_after_s,
        silent_after_s=11.0,
        proxied_lost_after_s=max(lost_after_s, 22.0),
    )


def a_weather(rng: Random) -> Weather:
    return rng.choice(
        [
            Weather(),
            Weather(delay_s=0.05),
            Weather(delay_s=0.01, lose_request=0.03, lose_answer=0.03, twice=0.03, late=0.02),
            Weather(delay_s=0.2, lose_request=0.1, lose_answer=0.1, twice=0.1, late=0.05),
            Weather(delay_s=0.01, twice=0.3, late=0.15, late_s=90.0),
        ]
    )


def a_mood(rng: Random) -> Mood:
    return rng.choice(
        [
            Mood(slow_s=rng.choice([0.1, 0.5])),
            Mood(fail=0.3),
            Mood(unheard=0.3),
            Mood(fail=0.1, unheard=0.2, slow_s=0.1),
            Mood(down=True),
            Mood(full=True),
            Mood(crash_before=0.15),
            Mood(crash_after=0.15),
            Mood(crash_before=0.05, crash_after=0.05, unheard=0.1, slow_s=0.05),
        ]
    )


def ranks_of_processes(rng: Random, layout: Layout) -> list[tuple[int, ...]]:
    """Mostly a process a rank; some hold two, a whole node, or all."""
    world = layout.world_size
    each = rng.choices([1, 2, 8, world], [12, 3, 1, 1])[0]
    each = max(each, world // 32)
    ranks = list(range(world))
    return [tuple(ranks[at : at + each]) for at in range(0, world, each)]


def a_report(rng: Random, start: dict[str, Any], odd: str | None) -> Report:
    """One rank's report. `start` holds what all ranks of the start have in common."""
    entry = start["entry_bytes"]
    pages = rng.randint(*start["pages"])
    floor = start["states"] * 256 * start["seqs"]
    budget = pages * entry + floor + rng.randrange(entry)
    classes = [
        page("kv", entry, multiple_of=start["multiple"], min_entries=start["least"]),
        *([state("ssm", 256, entries_per_req=start["states"])] if start["states"] else []),
    ]
    if start["ragged"] and rng.random() < 0.5:
        classes[0] = page(
            "kv", entry * 2, multiple_of=start["multiple"], min_entries=start["least"]
        )
        budget += pages * entry
    fields: dict[str, Any] = {
        "free_bytes": budget + 77,
        "kv_budget_bytes": budget,
        "max_num_seqs": start["seqs"],
        "classes": classes,
        "inputs": {"model": "llama", "dtype": "bf16"},
        "capacities": {"host": rng.randint(10, 20)} if start["capacities"] else None,
    }
    match odd:
        case "short":
            fields |= {"kv_budget_bytes": floor + 10}
        case "floor":
            fields |= {
                "kv_budget_bytes": 100,
                "max_num_seqs": start["seqs"],
                "classes": [state("ssm", 256, entries_per_req=start["states"] or 1), classes[0]],
            }
        case "nothing":
            fields |= {"free_bytes": 0, "kv_budget_bytes": 0}
        case "reserve":
            fields |= {"reserve_bytes": fields["free_bytes"] + 5}
        case "request":
            fields |= {
                "total_bytes": 10 * budget,
                "initial_free_bytes": budget,
                "requested_bytes": 2 * budget,
            }
        case "implausible":
            fields |= {"total_bytes": budget, "free_bytes": 0, "kv_budget_bytes": 0}
        case "unequal":
            fields |= {"inputs": {"model": "llama", "dtype": rng.choice(["fp8", "fp16"])}}
        case "wide":
            fields |= {"kv_budget_bytes": floor + 3 * entry}
    return Report(**fields)


ODD = ["short", "floor", "nothing", "reserve", "request", "implausible", "unequal", "wide"]


def what_all_share(rng: Random) -> dict[str, Any]:
    return {
        "entry_bytes": rng.choice([100, 1000, 1399]),
        "pages": (rng.choice([20, 80]), 100),
        "states": rng.choice([0, 0, 1, 3]),
        "seqs": rng.choice([1, 4]),
        "multiple": rng.choice([1, 1, 4]),
        "least": rng.choice([None, None, 4]),
        "ragged": rng.random() < 0.2,
        "capacities": rng.random() < 0.2,
    }


def a_script(
    rng: Random, ranks: tuple[int, ...], common: dict[str, Any], trouble: float, faults: bool
) -> Script:
    """What a process will do. trouble: the chance of each mishap. faults: it may be killed."""

    def chance(share: float = 1.0) -> bool:
        return rng.random() < trouble * share

    odd = rng.choice(ODD) if chance() else None
    script = Script(
        client=rng.choices(["async", "blocking"], [4, 1])[0],
        after_s=rng.choice([0.0, rng.uniform(0, 1), rng.uniform(0, 5)]),
        load_s=rng.choice([0.0, rng.uniform(0, 2), rng.uniform(0, 8)]),
        phases=rng.randint(1, 3),
        build_s=rng.choice([0.0, rng.uniform(0, 3)]),
        reports={rank: a_report(rng, common, odd) for rank in ranks},
        inputs={"image": "a"} if rng.random() < 0.3 else None,
        serves_s=rng.choice([None, rng.uniform(0.5, 15)]),
    )
    if chance():
        script.veto = rng.choice(["load", "build"])
    if chance():
        script.leaves = rng.choice(["load", "build"])
    if chance(0.3):
        script.never_reports = True
    if chance(0.3):
        script.never_builds = True
    if chance(0.3):
        script.builds_otherwise = True
    if chance(0.3):
        script.inputs = {"image": "b"}
    if faults and chance(1.5):
        script.dies_s = rng.uniform(0, 12)
        script.vanishes = rng.random() < 0.3
    if faults and chance(1.5):
        script.pauses = [(rng.uniform(0, 8), rng.choice([rng.uniform(0, 5), rng.uniform(5, 180)]))]
    return script


def good_script(rng: Random, ranks: tuple[int, ...], common: dict[str, Any]) -> Script:
    return Script(
        after_s=rng.uniform(0, 1),
        load_s=rng.uniform(0, 1),
        build_s=rng.uniform(0, 0.5),
        reports={rank: a_report(rng, common, None) for rank in ranks},
    )
