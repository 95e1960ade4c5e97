"""The policy of each engine: the defaults, and the rules of `policy.yaml` over them."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from fnmatch import fnmatchcase
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from coordinator.events import EngineName
from coordinator.policy import Policy, Setting

WILD = re.compile(r"[*?[]")


class Match(Setting):
    """Globs; an absent one matches everything."""

    namespace: str = "*"
    engine: str = "*"

    def fits(self, name: EngineName) -> bool:
        return fnmatchcase(name.namespace, self.namespace) and fnmatchcase(name.engine, self.engine)

    @property
    def fits_all(self) -> bool:
        return self.namespace == self.engine == "*"

    def may_meet(self, other: Match) -> bool:
        """Whether an engine may fit both. Never wrongly no."""
        return _may_meet(self.namespace, other.namespace) and _may_meet(self.engine, other.engine)


class PolicyRule(Setting):
    match: Match = Match()
    set: dict[str, Any]


class PolicyFile(Setting):
    """`policy.yaml`: rules in order; of several that match, each sets what it names."""

    rules: tuple[PolicyRule, ...] = ()


class Policies:
    """The defaults, and the file's rules over them."""

    def __init__(self, defaults: Policy | None = None, file: PolicyFile | None = None) -> None:
        self.defaults = defaults or Policy()
        self._rules = (file or PolicyFile()).rules
        self._check()

    def _check(self) -> None:
        """Raises ValueError unless every engine has a policy, whichever rules it fits.

        What holds between two settings is broken by two at most that each come from a rule, so it
        is enough to try every pair of rules, with those that fit every engine.
        """
        everywhere = {n for n, rule in enumerate(self._rules) if rule.match.fits_all}
        singles = ((n,) for n in range(len(self._rules)))
        pairs = (
            (a, b)
            for a, b in combinations(range(len(self._rules)), 2)
            if self._rules[a].match.may_meet(self._rules[b].match)
        )
        for chosen in chain([()], singles, pairs):
            together = sorted({*chosen, *everywhere})
            try:
                _merged(self.defaults, [self._rules[n] for n in together])
            except ValidationError as error:
                numbers = [n + 1 for n in together]
                which = f"rule {numbers[0]}" if len(numbers) == 1 else f"rules {numbers} together"
                raise ValueError(f"{which}: {_sentence(error)}") from error

    def of(self, name: EngineName) -> Policy:
        """The effective policy of an engine."""
        return _merged(self.defaults, [rule for rule in self._rules if rule.match.fits(name)])


def load_policies(path: Path, defaults: Policy | None = None) -> Policies:
    """Read a policy file. Raises ValueError with one sentence that says what to correct."""
    try:
        document = yaml.load(path.read_text(), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deep for a policy; correct it") from error
    try:
        return Policies(defaults, PolicyFile.model_validate(document or {}))
    except ValidationError as error:
        raise ValueError(f"{path}: {_sentence(error)}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _merged(policy: Policy, rules: Iterable[PolicyRule]) -> Policy:
    """Raises ValidationError when what the rules set makes no policy together."""
    fields = policy.model_dump()
    for rule in rules:
        for key, value in rule.set.items():
            before = fields.get(key)
            if isinstance(before, dict) and isinstance(value, dict):
                value = {**before, **value}
            fields[key] = value
    return Policy.model_validate(fields)


def _may_meet(one: str, other: str) -> bool:
    """Whether a name may match both globs: what stands before their first wildcards tells."""
    for plain, glob in ((one, other), (other, one)):
        if not WILD.search(plain):
            return fnmatchcase(plain, glob)
    first, second = (WILD.split(glob, maxsplit=1)[0] for glob in (one, other))
    return first.startswith(second) or second.startswith(first)


class _Loader(yaml.SafeLoader):
    """Of a key that stands twice YAML keeps the last, and whoever wrote the first never knows."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value!r} stands twice; remove one",
                    problem_mark=key.start_mark,
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field}: {first['msg']}" if field else first["msg"]
