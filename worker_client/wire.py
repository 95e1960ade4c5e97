"""The connections of one process: calls that are answered, and the stream that is held open."""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from kvaccord.errors import Invalid
from worker_client.flow import Answer, Call

CONNECT_S = 5.0
ANSWER_MAX_BYTES = 4 * 2**20  # a decision is at most 256 KiB; whatever is larger is not ours

# A host that vanishes is noticed within 10 s, by the kernel, also while no Python runs here.
KEEP_ALIVE = [
    (level, option, value)
    for level, name, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 2),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 2),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 8000),
    )
    if (option := getattr(socket, name, None)) is not None
]

Trace = Callable[[str, dict[str, Any]], None]


class Wire:
    """A coordinator's address, and a client for it that is made at the first use.

    token: sent as `Authorization: Bearer`. trust_env: whether proxy and certificate variables
    count; a proxy meant for downloads must not carry the calls of a start unless it is asked to.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        ca_file: str = "",
        trust_env: bool = False,
        proxied: bool = False,
    ) -> None:
        self.address = checked(address)
        self.token = token
        self.ca_file = ca_file
        self.trust_env = trust_env
        self.proxied = proxied
        self._https = httpx.URL(self.address).scheme == "https"
        self._made: httpx.Client | None = None
        self._making = threading.Lock()
        self._sockets: weakref.WeakSet[Any] = weakref.WeakSet()

    def options(self) -> dict[str, Any]:
        """What httpx's clients are made with, blocking or awaited, beside their transport."""
        headers = {"Accept-Encoding": "identity"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        return {
            "base_url": self.address,
            "trust_env": self.trust_env,
            "headers": headers,
            "verify": self.verify(),
        }

    def verify(self) -> ssl.SSLContext | bool:
        # Loading the CA bundle costs 30 ms and more; nothing is verified over http://.
        return tls_context(self.ca_file, self.trust_env) if self._https else False

    @property
    def _client(self) -> httpx.Client:
        with self._making:  # the session's thread may be first, or the caller's
            if self._made is None:
                options = self.options()
                if not self.trust_env:  # with a transport of its own httpx asks no proxy variable
                    options["transport"] = httpx.HTTPTransport(
                        verify=options["verify"], trust_env=False, socket_options=KEEP_ALIVE
                    )
                self._made = httpx.Client(**options)
            return self._made

    def call(self, call: Call) -> Answer:
        """Perform a call. Whatever goes wrong on the way is an Answer with error."""
        deadline_s = time.monotonic() + call.timeout_s
        try:
            with self._client.stream(
                call.method,
                call.path,
                content=call.body,
                headers=dict(call.headers),
                timeout=httpx.Timeout(call.timeout_s, connect=min(call.timeout_s, CONNECT_S)),
                extensions={"trace": self.tracing()},
            ) as response:
                body = bytearray()
                for part in response.iter_raw():
                    body += part
                    # The timeout above is per read: an answer may trickle past it for ever.
                    if len(body) > ANSWER_MAX_BYTES or time.monotonic() > deadline_s:
                        raise httpx.ReadError(f"no end of the answer after {len(body)} bytes")
        # RuntimeError: closed meanwhile. UnicodeError: a host name that no name service takes.
        except (httpx.HTTPError, RuntimeError, UnicodeError) as fault:
            return Answer(time.monotonic(), error=said_of(fault))
        return Answer(time.monotonic(), response.status_code, dict(response.headers), bytes(body))

    @contextmanager
    def stream(
        self,
        path: str,
        headers: dict[str, str],
        *,
        read_s: float,
        opened: Callable[[socket.socket], None],
    ) -> Iterator[httpx.Response]:
        """Hold a response open. `opened` is told the socket before the first byte comes."""
        with self._client.stream(
            "GET",
            path,
            headers=headers,
            timeout=httpx.Timeout(read_s, connect=CONNECT_S),
            extensions={"trace": self.tracing(opened)},
        ) as response:
            # A connection of the pool was traced when it was opened, for another call.
            opened(response.extensions["network_stream"].get_extra_info("socket"))
            yield response

    def tracing(self, opened: Callable[[socket.socket], None] | None = None) -> Trace:
        """A trace for httpx that remembers every socket, for a child that is forked later."""

        def trace(event: str, info: dict[str, Any]) -> None:
            if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                self.remember(connected := info["return_value"].get_extra_info("socket"))
                if opened is not None:
                    opened(connected)

        return trace

    def remember(self, connected: socket.socket) -> None:
        if isinstance(connected, socket.socket):  # asyncio shows a stand-in, of calls alone
            self._sockets.add(connected)
        if self.trust_env:  # made by httpx's own transport
            for option in KEEP_ALIVE:
                with contextlib.suppress(OSError):
                    connected.setsockopt(*option)

    def hang_up_in_child(self) -> None:
        """Close what was inherited over a fork, so that the parent's end can be seen."""
        for inherited in self._known():
            # Not shutdown(): that would end the parent's connection too.
            with contextlib.suppress(OSError):
                inherited.close()

    def close(self) -> None:
        """Close all connections. A later call opens new ones."""
        with self._making:
            made, self._made = self._made, None
        # Closing a socket does not wake a thread that reads it; shutting it down does.
        for connected in self._known():
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        if made is not None:
            made.close()

    def _known(self) -> list[socket.socket]:
        # No lock: in a forked child it might be held for ever by a thread that is not there.
        while True:
            try:
                return list(self._sockets)
            except RuntimeError:  # another thread has just connected
                continue


@functools.cache
def tls_context(ca_file: str, trust_env: bool) -> ssl.SSLContext:
    """One for the whole process, made when the first https:// address is called."""
    if not ca_file:
        return httpx.create_ssl_context(verify=True, trust_env=trust_env)
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as fault:
        raise Invalid(
            f"KVACCORD_CA_FILE is {ca_file!r}: {fault}; give a file of PEM certificates",
            field="KVACCORD_CA_FILE",
            value=ca_file,
        ) from None


def checked(address: str) -> str:
    """The address of a coordinator. Raises Invalid that shows no credentials."""
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as fault:
        raise _no_address(address, str(fault)) from None
    if url.userinfo:
        raise Invalid(
            "KVACCORD_URL holds a user or password; give it as http://HOST:PORT and an access"
            " token in KVACCORD_TOKEN",
            field="KVACCORD_URL",
        )
    if url.scheme not in ("http", "https") or not url.host:
        raise _no_address(address, "it has no http:// or https:// and host")
    if url.port is not None and not 0 < url.port < 2**16:  # it would wrap round
        raise _no_address(address, f"port {url.port} is not one of 1 to 65535")
    return address.rstrip("/")


def _no_address(address: str, why: str) -> Invalid:
    return Invalid(
        f"KVACCORD_URL is {address!r}: {why}; give it as http://HOST:PORT",
        field="KVACCORD_URL",
        value=address,
    )


def said_of(fault: Exception) -> str:
    return f"{type(fault).__name__} {fault}".strip()
