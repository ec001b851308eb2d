"""A web server of a test's own: it answers each path with the exact bytes, or the behaviour, that the test gives."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Behaviour = Callable[[Callable[[bytes], None]], None]


class Peer(socketserver.ThreadingTCPServer):
    """Listens on 127.0.0.1. `seen` holds the requests as they came, head only."""

    daemon_threads = False
    allow_reuse_address = True

    def __init__(self, answers: dict[str, bytes | Behaviour]) -> None:
        self.answers = answers
        self.seen: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def netloc(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{self.netloc}"


class _Handler(socketserver.StreamRequestHandler):
    timeout = 5

    def handle(self) -> None:
        peer = self.server
        assert isinstance(peer, Peer)
        head = b""
        while line := self.rfile.readline(65_536):
            head += line
            if line == b"\r\n":
                break
        peer.seen.append(head.decode("latin-1"))
        answer = peer.answers[head.split(b" ")[1].decode()]
        try:
            if isinstance(answer, bytes):
                self.wfile.write(answer)
            else:
                answer(self.request.sendall)
        except (BrokenPipeError, ConnectionResetError):
            return  # a client that has seen enough hangs up


def response(
    body: bytes = b"",
    *,
    status: str = "200 OK",
    content_type: str | None = "text/html",
    length: bool = True,
    **headers: str,
) -> bytes:
    """The bytes of one HTTP answer; header names are written with underscores."""
    lines = [f"HTTP/1.1 {status}", "Connection: close"]
    if content_type is not None:
        lines.append(f"Content-Type: {content_type}")
    if length:
        lines.append(f"Content-Length: {len(body)}")
    lines.extend(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@contextmanager
def serve(answers: dict[str, bytes | Behaviour]) -> Iterator[Peer]:
    """Serve `answers` until the block is left; every thread has ended then."""
    with Peer(answers) as peer:
        thread = threading.Thread(target=peer.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield peer
        finally:
            peer.shutdown()
            thread.join()
