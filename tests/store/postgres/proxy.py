"""A TCP proxy before PostgreSQL that loses what it is told to lose."""

from __future__ import annotations

import contextlib
import socket
import threading
from enum import Enum


class Loss(Enum):
    """What happens to the next message that makes something durable."""

    NOTHING = "nothing"
    REPLY = "reply"  # the server commits, its answer never arrives
    REQUEST = "request"  # the server never hears of it


class LossyProxy:
    """Forwards to `port` on loopback. `lose` arms it once; `lost` counts what it lost."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._loss = Loss.NOTHING
        self.lost = 0
        self.refusing = False
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def lose(self, loss: Loss) -> None:
        """Lose it the next time."""
        with self._lock:
            self._loss = loss

    def _takes(self, loss: Loss) -> bool:
        with self._lock:
            if self._loss is not loss:
                return False
            self._loss = Loss.NOTHING
            self.lost += 1
            return True

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            pending = threading.Event()  # a commit of this connection is on its way
            threading.Thread(target=self._requests, args=(client, server, pending), daemon=True).start()
            threading.Thread(target=self._replies, args=(client, server, pending), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, pending: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                if b"save_batch" in data or b"commit_batch" in data:
                    if self._takes(Loss.REQUEST):
                        break
                    pending.set()
                server.sendall(data)
        _close(client, server)

    def _replies(self, client: socket.socket, server: socket.socket, pending: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                if pending.is_set():
                    pending.clear()
                    if self._takes(Loss.REPLY):
                        break
                client.sendall(data)
        _close(client, server)

    def cut(self) -> None:
        """Break every connection."""
        for one in self._sockets:
            _close(one)
        self._sockets.clear()

    def close(self) -> None:
        """Stop."""
        _close(self._listener)
        self.cut()
        self._thread.join(5)


def _close(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
