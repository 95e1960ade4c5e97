"""What a caller and its environment say: checked, in one place, before anything is sent."""

from __future__ import annotations

import logging
import os
import re
import socket
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from pydantic import TypeAdapter, ValidationError

from kvaccord.errors import Invalid
from kvaccord.layout import Groups, Layout
from kvaccord.messages import Device, EngineWord, Join, Launch
from worker_client.causes import masked_inputs
from worker_client.launch import launch_from, parse, surroundings

log = logging.getLogger(__name__)
Mode = Literal["off", "observe", "enforce"]
MODES = ("off", "observe", "enforce")


@dataclass(frozen=True)
class Arguments:
    """join: None in mode off. url: empty in a world of one without a coordinator."""

    mode: Mode
    ranks: tuple[int, ...]
    layout: Layout
    namespace: str = "default"
    engine: str = ""
    url: str = ""
    join: Join | None = None
    patience_s: float | None = None
    token: str = ""
    ca_file: str = ""
    trust_env: bool = False
    proxied: bool = False

    @property
    def name(self) -> str:
        return f"{self.namespace}/{self.engine}"

    @property
    def address(self) -> str:
        return self.url.rstrip("/")


def settle(
    *,
    ranks: Iterable[int],
    layout: Layout | None,
    groups: Groups | Mapping[int, Groups] | None,
    engine: str | None,
    url: str | None,
    namespace: str | None,
    launch: Launch | str | None,
    inputs: Mapping[str, int | bool | str] | None,
    engine_version: str | None,
    device: Device | None,
    patience_s: float | None,
    mode: Mode | None,
    trust_env: bool,
) -> Arguments:
    """Arguments come before the environment. Raises a Refused that names what to correct.

    In the modes off and observe it raises nothing but for a mode that does not exist: what only
    watches must not be what fails a start.
    """
    asked = _asked(mode)
    given = {
        "layout": layout,
        "groups": groups,
        "engine": engine,
        "url": url,
        "namespace": namespace,
        "launch": launch,
        "inputs": inputs,
    }
    held: tuple[int, ...] = ()
    try:
        held = _ranks(ranks)
        for field, value in given.items():
            _must_be(field, value, *KINDS[field])
        env = os.environ
        url = (url or env.get("KVACCORD_URL") or "").strip()
        layout = Layout() if layout is None else layout
        chosen = _mode(asked, url, layout.world_size)
        if chosen == "off":
            return Arguments("off", held, layout)
        nonce = uuid.uuid4().hex
        join = Join(
            ranks=held,
            layout=layout,
            groups=_of_each(groups, held),
            nonce=nonce,
            launch=_launch(launch, layout.world_size, nonce),
            mode=chosen,
            inputs=None if inputs is None else masked_inputs(inputs),
            host=_host(),
            pid=os.getpid(),
            engine_version=engine_version,
            device=device,
        )
        return Arguments(
            mode=chosen,
            ranks=join.ranks,
            layout=layout,
            namespace=_name(
                "KVACCORD_NAMESPACE", namespace or env.get("KVACCORD_NAMESPACE") or "default"
            ),
            # Nobody else hears the name of an engine that is alone.
            engine=_name(
                "KVACCORD_ENGINE", engine or env.get("KVACCORD_ENGINE") or ("" if url else "alone")
            ),
            url=url,
            join=join,
            patience_s=_seconds("KVACCORD_PATIENCE_S", patience_s),
            token=_token("KVACCORD_TOKEN"),
            ca_file=env.get("KVACCORD_CA_FILE", "").strip(),
            trust_env=trust_env,
            proxied=env.get("KVACCORD_PROXIED", "").strip() not in ("", "0"),
        )
    except Exception as fault:
        if asked not in ("off", "observe"):
            raise
        log.info("not observed: %s", fault)
        known = layout if isinstance(layout, Layout) else Layout()
        return Arguments("off", held, known)


# What a value of the wrong type would break before a message could say so.
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "layout": ((Layout,), "a kvaccord.Layout: Layout(tp=2)"),
    "groups": ((Groups, Mapping), "a kvaccord.Groups, or {rank: Groups}"),
    "engine": ((str,), "a string"),
    "url": ((str,), "a string: http://HOST:PORT"),
    "namespace": ((str,), "a string"),
    "launch": ((Launch, str), "a string, RUN or RUN#RESTART, or a kvaccord.messages.Launch"),
    "inputs": ((Mapping,), "{name: value}"),
}


def _must_be(field: str, value: object, kinds: tuple[type, ...], what: str) -> None:
    if value is not None and not isinstance(value, kinds):
        raise _mistyped(field, value, what)


def _ranks(ranks: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(ranks)
    except TypeError:
        raise _mistyped("ranks", ranks, "the ranks of this process: ranks=[0]") from None


def _mistyped(field: str, value: object, what: str) -> Invalid:
    shown = repr(value)[:80]
    return Invalid(
        f"join({field}={shown}): it is of type {type(value).__name__}; give {what}",
        field=field,
        value=shown,
    )


def _of_each(
    groups: Groups | Mapping[int, Groups] | None, ranks: tuple[int, ...]
) -> dict[int, Groups] | None:
    if isinstance(groups, Groups):
        return dict.fromkeys(ranks, groups)
    return None if groups is None else dict(groups)


def _asked(mode: str | None) -> str:
    """The mode that is asked for; empty where none is."""
    asked = mode or os.environ.get("KVACCORD_MODE", "").strip()
    if asked and asked not in MODES:
        raise Invalid(
            f"KVACCORD_MODE is {asked!r}; it must be off, observe or enforce",
            field="KVACCORD_MODE",
            value=str(asked),
        )
    return asked


def _mode(asked: str, url: str, world_size: int) -> Mode:
    """What was asked for; else enforce where there is a coordinator, or a world of one."""
    if url:
        return cast(Mode, asked or "enforce")
    if world_size > 1 and asked not in ("", "off"):
        raise Invalid(
            f"KVACCORD_MODE is {asked}, a world of {world_size} ranks has no KVACCORD_URL, and one"
            " rank of many never plans alone; set KVACCORD_URL to the coordinator,"
            " http://HOST:PORT",
            field="KVACCORD_URL",
        )
    if world_size > 1 or asked in ("off", "observe"):
        return "off"  # nobody is there to be observed
    return "enforce"


def _name(variable: str, template: str) -> str:
    """A namespace or engine name, with {POD_NAME} and the like expanded."""

    def expanded(match: re.Match[str]) -> str:
        name = match[1]
        value = os.environ.get(name) or (socket.gethostname() if name == "HOSTNAME" else "")
        if not value:
            raise Invalid(
                f"{variable} is {template!r} and the environment has no {name}; set {name}, on"
                " Kubernetes from the pod's fields or labels",
                field=variable,
                value=template,
            )
        return value

    if not template:
        raise Invalid(
            f"{variable} is not set and join() names no engine; set it, or give join(engine=…)",
            field=variable,
        )
    name = re.sub(r"\{(POD_NAME|HOSTNAME|LWS_GROUP_INDEX)\}", expanded, template)
    try:
        return TypeAdapter[str](EngineWord).validate_python(name)
    except ValidationError:
        raise Invalid(
            f"{variable} is {name!r}; it must be 1 to 128 of A-Z a-z 0-9 . _ - and begin with a"
            " letter or digit",
            field=variable,
            value=name,
        ) from None


def _token(variable: str) -> str:
    token = os.environ.get(variable, "").strip()
    if not (token.isascii() and (not token or token.isprintable()) and " " not in token):
        raise Invalid(
            f"{variable} holds a character that no HTTP header may carry; it must be printable"
            " ASCII without spaces",
            field=variable,
        )
    return token


def _host() -> str:
    # Whatever a machine is called must not keep it from starting.
    return re.sub(r"[^\x21-\x7e]", "?", socket.gethostname())[:255] or "unknown"


def _launch(launch: Launch | str | None, world_size: int, nonce: str) -> Launch:
    if isinstance(launch, Launch):
        return launch
    if launch is not None:
        return parse(launch)
    return launch_from(surroundings(), world_size=world_size, nonce=nonce)


def _seconds(variable: str, given: float | None) -> float | None:
    """What the caller gave, else what the variable says, else None."""
    said = os.environ.get(variable, "").strip() if given is None else str(given)
    if not said:
        return None
    try:
        seconds = float(said)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise Invalid(
            f"{variable} is {said!r}; it must be a number of seconds above 0",
            field=variable,
            value=said,
        )
    return seconds
