"""`kvaccord doctor`: what would keep a start from its verdict, looked for before it begins."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import TypeAdapter, ValidationError

from cli.common import DEFAULT_URL as DEFAULT
from cli.common import AsJson, Asked, Url, clean, console, print_json, table
from cli.exits import PASSED, USAGE
from coordinator.policies import load_policies
from kvaccord import __version__
from kvaccord.errors import Invalid, KvaccordError, LaunchMissing
from kvaccord.messages import PROTOCOL, EngineWord
from worker_client.launch import launch_from
from worker_client.wire import Wire

ASKED = 5
SLOW_S = 0.25
SLOW_APPEND_S = 0.1
KNOWN = {
    f"KVACCORD_{name}"
    for name in (
        "URL", "NAMESPACE", "ENGINE", "LAUNCH", "PATIENCE_S", "MODE", "TOKEN", "PROXIED",
    )
}  # fmt: skip
TEMPLATES = re.compile(r"\{(POD_NAME|HOSTNAME|LWS_GROUP_INDEX)\}")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, how it is, and what to do if it is not well."""

    check: str
    result: Literal["ok", "warn", "fail"]
    said: str


def doctor(
    url: Url = DEFAULT,
    world_size: Annotated[
        int, typer.Option(min=1, help="Ranks of the start that is meant; 1 needs no launch.")
    ] = 2,
    policy: Annotated[
        Path | None, typer.Option(help="A policy.yaml to validate.", dir_okay=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the coordinator, this process's environment, and a policy file.

    Run it where a rank would run, with a rank's environment. Exit codes: 0 nothing fails, 1 else.
    """
    checks = [*environment(os.environ), launch(os.environ, world_size), *coordinator(url)]
    if policy is not None:
        checks.append(policy_file(policy))
    bad = any(check.result == "fail" for check in checks)
    if as_json:
        print_json({"checks": [asdict(check) for check in checks], "ok": not bad})
    else:
        shown = table("check", "", "")
        for check in checks:
            style = {"ok": "green", "warn": "yellow", "fail": "red"}[check.result]
            shown.add_row(check.check, check.result, clean(check.said), style=style)
        console.print(shown)
    raise typer.Exit(USAGE if bad else PASSED)


# --- here ---------------------------------------------------------------------------------------


def environment(env: Mapping[str, str]) -> Iterator[Check]:
    yield _address(env.get("KVACCORD_URL", ""))
    for variable, default in (("KVACCORD_ENGINE", ""), ("KVACCORD_NAMESPACE", "default")):
        yield _name(env, variable, default)
    if text := env.get("KVACCORD_PATIENCE_S", "").strip():
        try:
            well = 0 < float(text) < float("inf")
        except ValueError:
            well = False
        said = f"{text} s; a rank gives up before the budgets end if they are longer"
        wrong = f"{text!r} is no number of seconds above 0"
        yield Check("KVACCORD_PATIENCE_S", "warn" if well else "fail", said if well else wrong)
    for variable in sorted(v for v in env if v.startswith("KVACCORD_") and v not in KNOWN):
        yield Check(variable, "warn", f"no such variable; known are {', '.join(sorted(KNOWN))}")
    if proxies := [v for v in PROXIES if env.get(v) or env.get(v.lower())]:
        yield Check("proxy", "ok", f"{', '.join(proxies)} set; kvaccord does not use it")


def _address(url: str) -> Check:
    if not url:
        said = "not set; a start of several ranks needs it: http://HOST:PORT"
        return Check("KVACCORD_URL", "warn", said)
    try:
        Wire(url)
    except Invalid as fault:
        return Check("KVACCORD_URL", "fail", fault.detail)
    if re.search(r"//(localhost|127\.|\[::1\])", url):
        return Check("KVACCORD_URL", "warn", f"{url}: only ranks of this host reach it")
    return Check("KVACCORD_URL", "ok", url)


def _name(env: Mapping[str, str], variable: str, default: str) -> Check:
    template = env.get(variable) or default
    if not template:
        return Check(variable, "warn", "not set; every rank must then name the engine in join()")
    absent = [name for name in TEMPLATES.findall(template) if not _value(env, name)]
    if absent:
        return Check(variable, "fail", f"{template!r}: set {', '.join(absent)}")
    name = TEMPLATES.sub(lambda found: _value(env, found[1]), template)
    try:
        TypeAdapter[str](EngineWord).validate_python(name)
    except ValidationError:
        said = f"{name!r}: use 1 to 128 of A-Z a-z 0-9 . _ -, a letter or digit first"
        return Check(variable, "fail", said)
    return Check(variable, "ok", name)


def _value(env: Mapping[str, str], name: str) -> str:
    return env.get(name) or (os.uname().nodename if name == "HOSTNAME" else "")


def launch(env: Mapping[str, str], world_size: int) -> Check:
    try:
        found = launch_from(env, world_size=world_size, nonce="doctor-of-kvaccord")
    except LaunchMissing as fault:
        return Check("launch", "fail", fault.detail)
    except Invalid as fault:
        return Check("launch", "fail", fault.detail)
    if world_size == 1 and found.run == "doctor-of-kvaccord":
        return Check("launch", "ok", "none is needed by a world of one")
    if found.comes_back:
        said = f"{found} from {found.source}, which a later start may have again; KVACCORD_LAUNCH"
        return Check("launch", "warn", f"{said} tells an old start from a new one")
    return Check("launch", "ok", f"{found} from {found.source}")


def policy_file(path: Path) -> Check:
    try:
        load_policies(path)
    except (OSError, ValueError) as fault:
        return Check("policy", "fail", f"{path}: {fault}")
    return Check("policy", "ok", f"{path} is valid")


# --- there --------------------------------------------------------------------------------------


def coordinator(url: str) -> Iterator[Check]:
    """Reachable, ready, of this version, quick, with a quick store. Durations only: no clocks."""
    try:
        asked = Asked(url)
        asked.get("/healthz")
    except KvaccordError as fault:
        yield Check("coordinator", "fail", str(fault))
        return
    yield Check("coordinator", "ok", f"{asked.url} answers")
    try:
        ready = asked.document("/readyz")
    except KvaccordError as fault:
        yield Check("ready", "fail", str(fault))
        ready = {}
    else:
        store = f", store {ready['store']}" if "store" in ready else ""
        yield Check("ready", "ok", f"its store answers{store}")
    yield _version(asked, ready)
    yield _latency(asked)
    yield from _store(asked)


def _version(asked: Asked, ready: Mapping[str, Any]) -> Check:
    try:
        theirs = str(asked.document("/openapi.json")["info"]["version"])
    except (KvaccordError, KeyError, TypeError) as fault:
        return Check("version", "fail", f"it does not say its version: {fault}")
    protocol = ready.get("protocol", PROTOCOL if theirs == __version__ else None)
    if protocol is not None and protocol != PROTOCOL:
        said = f"it speaks protocol {protocol}, this side {PROTOCOL}: install the same kvaccord"
        return Check("version", "fail", said)
    if theirs != __version__:
        return Check("version", "warn", f"it is {theirs}, this side {__version__}")
    return Check("version", "ok", f"{theirs} on both sides, protocol {PROTOCOL}")


def _latency(asked: Asked) -> Check:
    took: list[float] = []
    for _ in range(ASKED):
        began_s = time.monotonic()
        try:
            asked.get("/healthz")
        except KvaccordError as fault:
            return Check("latency", "fail", str(fault))
        took.append(time.monotonic() - began_s)
    median_s, most_s = statistics.median(took), max(took)
    said = f"{median_s * 1000:.1f} ms median, {most_s * 1000:.1f} ms most of {ASKED} calls"
    return Check("latency", "warn" if median_s > SLOW_S else "ok", said)


def _store(asked: Asked) -> Iterator[Check]:
    """How long its appends took so far, by its own metrics."""
    try:
        metrics = asked.get("/metrics").text
    except KvaccordError:
        return
    found = dict(re.findall(r"^kvaccord_append_seconds_(sum|count) (\S+)$", metrics, flags=re.M))
    count = float(found.get("count", 0))
    if count:
        mean_s = float(found["sum"]) / count
        said = f"{mean_s * 1000:.1f} ms mean of {count:.0f} appends since it started"
        yield Check("store", "warn" if mean_s > SLOW_APPEND_S else "ok", said)
    else:
        yield Check("store", "ok", "no append yet since it started")
