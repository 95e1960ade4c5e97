"""`kvaccord serve`: one coordinator on one address."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
import uvicorn

from coordinator.api import create_app
from coordinator.faults import Faults
from coordinator.logs import EngineLog, StoreUnreadable, open_log
from coordinator.policies import Policies, load_policies
from coordinator.policy import Ends, Policy
from coordinator.service import Service
from coordinator.settings import Settings

PORT = 8970
USAGE = 1
DRAIN_S = 0.5
# As many waiting connections as the kernel allows (net.core.somaxconn): all ranks come back at
# once after a restart, and whom a full queue drops is tried again only after 1, 3, 7, 15 s.
BACKLOG = 65_535


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = PORT,
    store: Annotated[
        str, typer.Option(help="memory, or sqlite:///PATH (four slashes: absolute).")
    ] = "sqlite:///kvaccord.db",
    policy: Annotated[
        Path | None, typer.Option(help="policy.yaml: budgets and limits by engine; see doctor.")
    ] = None,
    gather_s: Annotated[float, typer.Option(help="Seconds until all ranks have joined.")] = 1800,
    report_s: Annotated[float, typer.Option(help="Seconds from then until all reported.")] = 7200,
    apply_s: Annotated[float, typer.Option(help="Seconds from PASSED until all built.")] = 1800,
    stall_s: Annotated[
        float, typer.Option(help="Seconds without progress that make a rank stuck.")
    ] = 300,
    lost_after_s: Annotated[
        float, typer.Option(help="Seconds a process may stay away once numbers are agreed.")
    ] = 30,
    proxied_lost_after_s: Annotated[
        float, typer.Option(help="Seconds without a beat of a process behind a proxy.")
    ] = 120,
    enable_faults: Annotated[
        bool, typer.Option("--enable-faults", help="Staging only; needs --chaos-token-file.")
    ] = False,
    chaos_token_file: Annotated[
        Path | None, typer.Option(help="File with the token that may arm faults.")
    ] = None,
) -> None:
    """Serve the coordinator until SIGTERM or Ctrl-C."""
    for name, seconds in (
        ("--gather-s", gather_s),
        ("--report-s", report_s),
        ("--apply-s", apply_s),
        ("--stall-s", stall_s),
        ("--lost-after-s", lost_after_s),
        ("--proxied-lost-after-s", proxied_lost_after_s),
    ):
        if not 0 < seconds <= 10**7:  # NaN fails this too
            _refuse(f"{name} {seconds:g}: expected more than 0 and at most 10000000 seconds")
    faults, token = None, ""
    if enable_faults:
        token = _chaos_token(chaos_token_file)
        faults = Faults()
    elif chaos_token_file is not None:
        _refuse("--chaos-token-file without --enable-faults: name both or neither")
    listener = _listen(host, port)
    log = _open(store)
    settings = _settings(
        policy,
        gather_s,
        report_s,
        apply_s,
        stall_s,
        lost_after_s=lost_after_s,
        proxied_lost_after_s=proxied_lost_after_s,
    )
    service = Service(log, settings)
    app = create_app(service, faults_=faults, chaos_token=token)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if store == "memory":
        logging.getLogger("kvaccord").warning("--store memory: rounds end with this process")
    if not _is_loopback(listener):
        logging.getLogger("kvaccord").warning(
            "%s is reachable from other hosts and asks for no token yet: keep it inside a private"
            " network (docs/security.md)",
            host,
        )
    if faults is not None:
        logging.getLogger("kvaccord").warning("fault injection is enabled: never in production")
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        backlog=BACKLOG,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=3,
    )
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"kvaccord serves http://{shown}:{listener.getsockname()[1]}/ on {store}")
    server = _Server(config, service, lambda: _reload(service, policy))
    server.run(sockets=[listener])
    if server.refusal is not None:
        _refuse(str(server.refusal))


class _Server(uvicorn.Server):
    """Ends its streams and long polls on the first signal, so that it stops at once."""

    def __init__(
        self, config: uvicorn.Config, service: Service, reload: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._reload = reload
        self.refusal: StoreUnreadable | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if hasattr(signal, "SIGHUP"):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        try:
            await self._service.start()  # every open round is watched before anyone is answered
        except StoreUnreadable as error:
            self.refusal, self.should_exit = error, True
            return
        # Rounds are trees of small objects that stay: to look for cycles among them after every 700
        # new ones took a fifth of all CPU while thousands of ranks started.
        gc.set_threshold(50_000, 20, 100)
        gc.freeze()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.stop()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Whoever asks meanwhile hears 503 from /readyz, and is sent elsewhere.
        await asyncio.sleep(DRAIN_S)
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket whose connections the kernel itself watches.

    A vanished host ends its stream within 8 to 13 s; a process that is only busy or stopped keeps
    it, for the kernel answers in its place. Accepted sockets inherit these options on Linux.
    """
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG
        )
    except OSError as error:
        _refuse(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port")
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # asyncio sets this only on sockets that it made itself; without it an answer waits for the
    # acknowledgement of its own headers, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 2),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 8000),
    ):
        if hasattr(socket, option):  # not every kernel has each of them
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return listener


def _settings(
    path: Path | None,
    gather_s: float,
    report_s: float,
    apply_s: float,
    stall_s: float,
    **presence: float,
) -> Settings:
    """The options are the defaults, which the file's rules overrule."""
    base = Policy()
    try:
        defaults = Policy(
            gather_s=gather_s,
            report_s=Ends(soft=min(base.report_s.soft, report_s), hard=report_s),
            apply_s=Ends(soft=min(base.apply_s.soft, apply_s), hard=apply_s),
            stall_s=stall_s,
            grace_s=min(base.grace_s, gather_s, report_s, apply_s),
        )
        policies = load_policies(path, defaults) if path else Policies(defaults)
        return Settings(policies=policies, **presence)
    except ValueError as error:
        _refuse(str(error))


def _reload(service: Service, path: Path | None) -> None:
    """SIGHUP: the file's rules from now on; a file that makes no sense changes nothing."""
    if path is None:
        logging.getLogger("kvaccord").warning("SIGHUP without --policy: nothing to read again")
        return
    try:
        service.policies = load_policies(path, service.policies.defaults)
    except ValueError as error:
        logging.getLogger("kvaccord").error("policy not reloaded: %s", error)
    else:
        logging.getLogger("kvaccord").info("policy reloaded from %s", path)


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def _open(store: str) -> EngineLog:
    try:
        return open_log(store)
    except (ValueError, StoreUnreadable) as error:
        _refuse(str(error))


def _chaos_token(path: Path | None) -> str:
    if path is None:
        _refuse("--enable-faults needs --chaos-token-file FILE: two settings arm it, never one")
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        _refuse(f"--chaos-token-file {path}: {error}; write a token of 16 characters or more to it")
    if len(token) < 16 or not token.isascii():
        _refuse(
            f"--chaos-token-file {path}: the token must have 16 ASCII characters or more; make one"
            f" with: openssl rand -hex 32 > {path}"
        )
    return token


def _refuse(sentence: str) -> NoReturn:
    typer.echo(f"kvaccord serve: {sentence}", err=True)
    raise typer.Exit(USAGE)
