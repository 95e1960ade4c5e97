"""The policy of each engine: the defaults, and the rules of `policy.yaml` over them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from coordinator.events import EngineName
from coordinator.policy import Policy, Setting


class Match(Setting):
    """Globs; an absent one matches everything."""

    namespace: str = "*"
    engine: str = "*"

    def fits(self, name: EngineName) -> bool:
        return fnmatchcase(name.namespace, self.namespace) and fnmatchcase(name.engine, self.engine)


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
        for number, rule in enumerate(self._rules, 1):
            try:
                _merged(self.defaults, rule.set)
            except ValidationError as error:
                raise ValueError(f"rule {number}: {_sentence(error)}") from error

    def of(self, name: EngineName) -> Policy:
        """The effective policy of an engine."""
        policy = self.defaults
        for rule in self._rules:
            if rule.match.fits(name):
                policy = _merged(policy, rule.set)
        return policy


def load_policies(path: Path, defaults: Policy | None = None) -> Policies:
    """Read a policy file. Raises ValueError with one sentence that says what to correct."""
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    try:
        return Policies(defaults, PolicyFile.model_validate(document or {}))
    except ValidationError as error:
        raise ValueError(f"{path}: {_sentence(error)}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _merged(policy: Policy, changes: dict[str, Any]) -> Policy:
    fields = policy.model_dump()
    for key, value in changes.items():
        before = fields.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            value = {**before, **value}
        fields[key] = value
    return Policy.model_validate(fields)


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field}: {first['msg']}" if field else first["msg"]
