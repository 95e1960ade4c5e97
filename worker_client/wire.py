"""One HTTP client per process: the main thread's calls and the session thread's stream."""

from __future__ import annotations

import socket
import time
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


class Wire:
    """A coordinator's address, and a client for it that is made at the first use."""

    def __init__(self, address: str) -> None:
        try:
            url = httpx.URL(address)
        except httpx.InvalidURL as fault:
            raise _no_address(address, str(fault)) from None
        if url.scheme not in ("http", "https") or not url.host:
            raise _no_address(address, "it has no http:// or https:// and host")
        self.address = address.rstrip("/")
        self._https = url.scheme == "https"
        self._made: httpx.Client | None = None

    @property
    def _client(self) -> httpx.Client:
        if self._made is None:
            # Loading the CA bundle costs 30 ms and more; nothing is verified over http://.
            # trust_env off: a proxy meant for downloads must not carry the calls of a start.
            self._made = httpx.Client(
                base_url=self.address,
                trust_env=False,
                headers={"Accept-Encoding": "identity"},
                transport=httpx.HTTPTransport(
                    verify=self._https, trust_env=False, socket_options=KEEP_ALIVE
                ),
            )
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
            ) as response:
                body = bytearray()
                for part in response.iter_raw():
                    body += part
                    # The timeout above is per read: an answer may trickle past it for ever.
                    if len(body) > ANSWER_MAX_BYTES or time.monotonic() > deadline_s:
                        raise httpx.ReadError(f"no end of the answer after {len(body)} bytes")
        except httpx.HTTPError as fault:
            return Answer(time.monotonic(), error=_said(fault))
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

        def trace(event: str, info: dict[str, Any]) -> None:
            if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                opened(info["return_value"].get_extra_info("socket"))

        with self._client.stream(
            "GET",
            path,
            headers=headers,
            timeout=httpx.Timeout(read_s, connect=CONNECT_S),
            extensions={"trace": trace},
        ) as response:
            # A connection of the pool was traced when it was opened, for another call.
            opened(response.extensions["network_stream"].get_extra_info("socket"))
            yield response

    def close(self) -> None:
        """Close all connections. A later call opens new ones."""
        made, self._made = self._made, None
        if made is not None:
            made.close()


def _no_address(address: str, why: str) -> Invalid:
    return Invalid(
        f"KVACCORD_URL is {address!r}: {why}; give it as http://HOST:PORT",
        field="KVACCORD_URL",
        value=address,
    )


def _said(fault: httpx.HTTPError) -> str:
    return f"{type(fault).__name__} {fault}".strip()
