"""The connections of one process: calls that are answered, and the stream that is held open."""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import httpx

from kvaccord.errors import Invalid
from worker_client.flow import Answer, Call

CONNECT_S = 5.0
ANSWER_MAX_BYTES = 4 * 2**20  # a decision is at most 512 KiB; whatever is larger is not ours

# A host that vanishes is noticed within 13 s, by the kernel, also while no Python runs here.
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

# How far a call had come when its time was up, by the last of these that httpcore had begun.
REACHED = {
    "connection.connect_tcp.started": "the host was not found or not reached",
    "connection.start_tls.started": "it did not agree on TLS",
    "http11.send_request_headers.started": "it did not take the call",
    "http11.receive_response_headers.started": "it took the call and sent no whole answer",
    "http11.receive_response_body.started": "its answer had no end",
}


class Begun:
    """A call under way in a thread of its own.

    Nothing else bounds it: looking up a name has no limit, and an answer that trickles in byte by
    byte gives each read its whole time anew.
    """

    def __init__(self, wire: Wire, call: Call) -> None:
        self.answer: Future[Answer] = Future()
        self.answer.set_running_or_notify_cancel()
        self._wire, self._call = wire, call
        self._reached = "it was not begun"
        self._given_up = False
        self._thread = threading.Thread(target=self._perform, name="kvaccord-call", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending, or there is no thread left
            self._perform()

    def wait(self) -> Answer:
        """Block until it is answered or its time is up."""
        try:
            answer = self.answer.result(self._call.timeout_s)
        except TimeoutError:
            return self.late()
        with contextlib.suppress(RuntimeError):  # it was never started
            self._thread.join()  # it has nothing left to do, and callers may count their threads
        return answer

    def late(self) -> Answer:
        """What is said once its time is up."""
        error = f"no answer within {self._call.timeout_s:.1f} s: {self._reached}"
        return Answer(time.monotonic(), error=error)

    def give_up(self) -> None:
        """Nobody waits for it any more: it must not be sent later, nor its thread stay."""
        self._given_up = True
        if not self.answer.done():
            self._wire.cut_calls()

    def _perform(self) -> None:
        try:
            self.answer.set_result(self._wire.perform(self._call, self._trace))
        except BaseException as fault:
            self.answer.set_exception(fault)

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        self._reached = REACHED.get(event, self._reached)
        self._wire.trace(event, info)
        if self._given_up and event == "http11.send_request_headers.started":
            raise RuntimeError("given up")


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
        answer_max_bytes: int = ANSWER_MAX_BYTES,
    ) -> None:
        self.address = checked(address)
        self.token = token
        self.ca_file = ca_file
        self.trust_env = trust_env
        self.proxied = proxied
        self.answer_max_bytes = answer_max_bytes
        self._https = httpx.URL(self.address).scheme == "https"
        self._made: httpx.Client | None = None
        self._making = threading.Lock()
        self._sockets: weakref.WeakSet[Any] = weakref.WeakSet()
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()  # those of them that are held open

    @property
    def _client(self) -> httpx.Client:
        with self._making:  # the session's thread may be first, or a call's
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> httpx.Client:
        headers = {"Accept-Encoding": "identity"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        # Loading the CA bundle costs 30 ms and more; nothing is verified over http://.
        verify = tls_context(self.ca_file, self.trust_env) if self._https else False
        if not self.trust_env:  # with a transport of its own httpx asks no proxy variable
            transport = httpx.HTTPTransport(
                verify=verify, trust_env=False, socket_options=KEEP_ALIVE
            )
            return httpx.Client(
                base_url=self.address, headers=headers, trust_env=False, transport=transport
            )
        try:
            return httpx.Client(base_url=self.address, headers=headers, verify=verify)
        except (httpx.InvalidURL, ValueError, ImportError) as fault:
            raise Invalid(
                f"trust_env is on and a proxy variable cannot be used: {fault}; correct"
                " HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, or leave trust_env off",
                field="trust_env",
            ) from None

    def call(self, call: Call) -> Answer:
        """Perform a call within its time. What goes wrong on the way is an Answer with error."""
        begun = Begun(self, call)
        try:
            return begun.wait()
        finally:
            begun.give_up()

    def perform(self, call: Call, trace: Trace | None = None) -> Answer:
        """As call(), and it may take longer: for threads that nobody waits for."""
        try:
            with self._client.stream(
                call.method,
                call.path,
                content=call.body,
                headers=dict(call.headers),
                timeout=httpx.Timeout(call.timeout_s, connect=min(call.timeout_s, CONNECT_S)),
                extensions={"trace": trace or self.trace},
            ) as response:
                body = bytearray()
                for part in response.iter_raw():
                    body += part
                    if len(body) > self.answer_max_bytes:
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

        def holds(connected: socket.socket) -> None:
            self._streams.add(connected)
            opened(connected)

        def trace(event: str, info: dict[str, Any]) -> None:
            if (connected := self.trace(event, info)) is not None:
                holds(connected)

        with self._client.stream(
            "GET",
            path,
            headers=headers,
            timeout=httpx.Timeout(read_s, connect=CONNECT_S),
            extensions={"trace": trace},
        ) as response:
            # A connection of the pool was traced when it was opened, for another call.
            holds(response.extensions["network_stream"].get_extra_info("socket"))
            yield response

    def trace(self, event: str, info: dict[str, Any]) -> socket.socket | None:
        """Told by httpx what it does; remembers every socket, and returns one that is new."""
        if event not in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            return None
        connected: socket.socket = info["return_value"].get_extra_info("socket")
        self._sockets.add(connected)
        if self.trust_env:  # made by httpx's own transport
            for option in KEEP_ALIVE:
                with contextlib.suppress(OSError):
                    connected.setsockopt(*option)
        return connected

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
        _shut(known := self._known())
        if made is not None:
            made.close()
        for connected in known:  # one that was just being opened is not made's yet
            connected.close()

    def cut_calls(self) -> None:
        """End the connections of calls, and no stream."""
        _shut(connected for connected in self._known() if connected not in self._streams)

    def _known(self) -> list[socket.socket]:
        # No lock: in a forked child it might be held for ever by a thread that is not there.
        while True:
            try:
                return list(self._sockets)
            except RuntimeError:  # another thread has just connected
                continue


def _shut(sockets: Iterable[socket.socket]) -> None:
    # Closing a socket does not wake a thread that reads it; shutting it down does.
    for connected in sockets:
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)


@functools.cache
def tls_context(ca_file: str, trust_env: bool) -> ssl.SSLContext:
    """One for the whole process, made when the first https:// address is called."""
    if ca_file:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(ca_file)
        except OSError as fault:  # ssl.SSLError is one
            raise Invalid(
                f"KVACCORD_CA_FILE is {ca_file!r}: {fault}; give a file of PEM certificates",
                field="KVACCORD_CA_FILE",
                value=ca_file,
            ) from None
        return context
    try:
        return httpx.create_ssl_context(verify=True, trust_env=trust_env)
    except OSError as fault:
        # Python itself reads SSLKEYLOGFILE, whether the environment is trusted or not.
        variables = "SSL_CERT_FILE, SSL_CERT_DIR or SSLKEYLOGFILE" if trust_env else "SSLKEYLOGFILE"
        raise Invalid(
            f"TLS cannot be made ready: {fault}; correct or unset {variables}",
            field=variables,
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
    if url.query or url.fragment:
        raise _no_address(address, "it has a query or fragment")
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
