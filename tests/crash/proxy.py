"""A TCP proxy that makes trouble: it resets, refuses, swallows one way or both, and heals."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Literal

Mode = Literal["pass", "refuse", "swallow", "swallow answers"]


class Proxy:
    """mode: of what passes from now on. cut() resets every connection that is open."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.mode: Mode = "pass"
        self.swallowed = 0  # bytes
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def turn(self, mode: Mode, *, cut: bool = False) -> None:
        self.mode = mode
        if cut:
            self.cut()

    def cut(self) -> None:
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.mode == "refuse":
                client.close()
            else:
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            client,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self._target)) as server,
        ):
            with self._lock:
                self._open |= {client, server}
            back = threading.Thread(target=self._carry, args=(server, client, True), daemon=True)
            back.start()
            self._carry(client, server, False)
            back.join()
            with self._lock:
                self._open -= {client, server}

    def _carry(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.mode == "swallow" or (self.mode == "swallow answers" and answers):
                    self.swallowed += len(data)
                else:
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy(port: int) -> Iterator[Proxy]:
    between = Proxy(port)
    try:
        yield between
    finally:
        between.close()
