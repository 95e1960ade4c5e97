"""policy.yaml: what an operator wrote is what holds, for every engine, or it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.events import EngineName
from coordinator.policies import Policies, load_policies
from coordinator.policy import Ends, Policy
from kvaccord.messages import AskedBudgets, AskedEnds
from tests.builders import Log, a_join

SHORT = "{match: {engine: 'big-*'}, set: {report_s: {soft: 1000, hard: 2000}}}"


def policies(folder: Path, text: str) -> Policies:
    file = folder / "policy.yaml"
    file.write_text(text)
    return load_policies(file)


@pytest.mark.parametrize("glob", ["big-*", "*", "big-llama", "b*a", "[a-c]ig-*"])
def test_rules_that_contradict_each_other_where_they_meet_are_refused(tmp_path, glob):
    other = f"{{match: {{engine: '{glob}'}}, set: {{report_s: {{soft: 5000}}}}}}"
    with pytest.raises(ValueError, match=r"rules? .*soft 5000 is above hard 2000"):
        policies(tmp_path, f"rules: [{SHORT}, {other}]")


@pytest.mark.parametrize("glob", ["small-*", "big", "llama"])
def test_rules_that_never_meet_may_differ(tmp_path, glob):
    other = f"{{match: {{engine: '{glob}'}}, set: {{report_s: {{soft: 5000}}}}}}"
    read = policies(tmp_path, f"rules: [{SHORT}, {other}]")
    assert read.of(EngineName("default", "big-llama")).report_s == Ends(soft=1000, hard=2000)
    assert read.of(EngineName("default", glob.replace("*", "a"))).report_s.soft == 5000


def test_a_rule_may_rely_on_one_that_fits_every_engine(tmp_path):
    all_of_them = "{set: {report_s: {hard: 10000}}}"
    slow = "{match: {engine: 'slow-*'}, set: {report_s: {soft: 9000}}}"
    read = policies(tmp_path, f"rules: [{all_of_them}, {slow}]")
    assert read.of(EngineName("default", "slow-1")).report_s == Ends(soft=9000, hard=10000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rules: [{set: {gather_s: yes}}]", "gather_s"),
        ("rules: [{set: {gather_s: '100'}}]", "gather_s"),
        ("rules: [{set: {keep_rounds: '7'}}]", "keep_rounds"),
        ("rules: [{set: {spread_limit: yes}}]", "spread_limit"),
        ("rules: [{set: {gather_s: 5, gather_s: 500}}]", "'gather_s' stands twice"),
        ("rules: [{set: {gather_s: 5}}]\nrules: []", "'rules' stands twice"),
        ("rules: {[a]: 1, [a]: 2}", "no YAML"),
        ("[" * 3000, "nested too deep"),
    ],
)
def test_what_yaml_would_read_as_something_else_is_refused(tmp_path, text, said):
    with pytest.raises(ValueError, match=said):
        policies(tmp_path, text)


@pytest.mark.parametrize(
    "asked",
    [
        AskedBudgets(gather_s=0.2),
        AskedBudgets(report_s=AskedEnds(hard=0.2)),
        AskedBudgets(apply_s=AskedEnds(soft=0.1, hard=0.2)),
    ],
)
def test_a_grace_shrinks_with_the_budgets_that_a_join_asked_for(asked):
    shorter = Policy().shortened(asked)
    assert (shorter.grace_s, shorter.shortfall_grace_s) == (0.2, 0.2)
    log = Log()
    log.joined(a_join(0, budgets=asked)).claims()
    assert log.round.policy == shorter
    assert log.replayed() == log.engine
