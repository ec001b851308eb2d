"""A small local web site with real SEO faults, served on loopback: what the SEO example audits.

    python -m endstop_examples.site --port 8731     # prints its URL, serves until it is interrupted

The pages stand in `site_pages/` beside this file; the redirect, the missing page and the page that is too big are
made here.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from urllib.parse import urlsplit

PORT = 8731
BIG_PAGE_BYTES = 3 * 1024 * 1024
IDLE_SECONDS_MAX = 5
REDIRECTS = {"/old-repairs": "/repairs.html", "/old-old-repairs": "/old-repairs"}
CONTENT_TYPES = {".html": "text/html", ".txt": "text/plain; charset=utf-8"}
MISSING_PAGE = b"<!doctype html><html lang=en><title>Not found</title><h1>Not found</h1></html>"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    content_type: str
    body: bytes


def load_pages() -> dict[str, _Page]:
    """Every page of the site by its path, read from the package's own files."""
    pages = {}
    for entry in files("endstop_examples").joinpath("site_pages").iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix in CONTENT_TYPES:
            pages["/" + entry.name] = _Page(content_type=CONTENT_TYPES[suffix], body=entry.read_bytes())
    pages["/"] = pages["/index.html"]
    line = b"<p>One more bell, one more saddle, one more basket.</p>\n"
    lines = line * (BIG_PAGE_BYTES // len(line) + 1)
    pages["/archive.html"] = _Page(
        content_type="text/html; charset=utf-8", body=b"<!doctype html><title>Archive</title>" + lines
    )
    return pages


class _SiteServer(ThreadingHTTPServer):
    # Not daemons: closing the server waits for its request threads, so none is left over.
    daemon_threads = False

    def __init__(self, port: int) -> None:
        self.pages = load_pages()
        super().__init__(("127.0.0.1", port), _SiteHandler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _SiteHandler(BaseHTTPRequestHandler):
    timeout = IDLE_SECONDS_MAX

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = urlsplit(self.path).path
        server = self.server
        page = server.pages.get(path) if isinstance(server, _SiteServer) else None
        if path in REDIRECTS:
            self.send_response(301)
            self.send_header("Location", REDIRECTS[path])
            page = _Page(content_type="text/html", body=b"")
        elif page is None:
            self.send_response(404)
            page = _Page(content_type="text/html; charset=utf-8", body=MISSING_PAGE)
        else:
            self.send_response(200)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        if with_body:
            try:
                self.wfile.write(page.body)
            except (BrokenPipeError, ConnectionResetError):
                # A client that hangs up in the middle of the big page does what this site is here to provoke.
                self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        """Stay silent: the printed URL is the only output."""


@contextmanager
def serve_site(port: int = 0) -> Iterator[str]:
    """Serve the site on 127.0.0.1 (port 0: any free one), give its base URL, and stop serving on leaving.

    Raises OSError when the port is taken.
    """
    server = _SiteServer(port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="endstop-examples-site")
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main() -> None:
    """Serve the site until interrupted; the first line of output is its URL."""
    parser = argparse.ArgumentParser(prog="python -m endstop_examples.site", description="Serve the example site.")
    parser.add_argument("--port", type=int, default=PORT, help=f"port on 127.0.0.1; 0: any free one (default {PORT})")
    server = _SiteServer(parser.parse_args().port)
    print(server.url, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("stopped", flush=True)
    finally:
        server.server_close()


if __name__ == "__main__":
    main()
