"""Fetch one HTML page from an address that a model chose. This file guards one rule:

    no byte leaves for an address that was not checked, and nothing is read past a limit.

The check stands where the connection is made: the host is resolved once, every address is judged, and the socket
connects to a judged address, so a name that resolves differently a moment later (DNS rebinding) changes nothing.
Redirects are followed by hand and go through the same door. Proxies of the environment are not used: they would
connect in our place, unchecked.
"""

from __future__ import annotations

import os
import queue
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urljoin, urlsplit

import httpcore
import httpx

from endstop_examples.addresses import Resolve, refused_as, resolve_host
from endstop_examples.refusals import ExampleError, shown

REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
HTML_TYPES = frozenset({"text/html", "application/xhtml+xml"})
REQUEST_HEADERS = {
    "user-agent": "endstop-seo-example",
    "accept": "text/html,application/xhtml+xml",
    "accept-encoding": "gzip",
}
LOCATIONS = "endstop_examples.locations"
ALLOW_VARIABLE = "ENDSTOP_SEO_ALLOW"

_SocketOptions = Iterable[tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]]


class FetchError(ExampleError):
    """The page was not fetched. The message says what was refused or failed, never what the page said."""


class UrlRefusedError(FetchError):
    """The URL itself is not acceptable: scheme, length, credentials, or not a URL at all. Nothing was sent."""


class AddressRefusedError(FetchError):
    """The host resolves to an address that is not public and not allowed. Nothing was sent to it."""


class NameUnresolvedError(FetchError):
    """The host name could not be resolved."""


class RedirectRefusedError(FetchError):
    """Too many redirects, or a redirect that says nowhere."""


class ContentTypeRefusedError(FetchError):
    """The answer is not HTML."""


class BodyTooLargeError(FetchError):
    """The answer is larger than the limit, on the wire or unpacked."""


class EncodingRefusedError(FetchError):
    """The answer is packed in a way that was not asked for, or badly packed."""


class FetchTimeoutError(FetchError):
    """The time limit of the whole fetch ran out."""


class ConnectionFailedError(FetchError):
    """The connection could not be made, broke, or did not speak HTTP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRules:
    """Limits of one fetch, and the hosts that may be private (`host` or `host:port`, lower case)."""

    redirects_max: int = 5
    body_bytes_max: int = 2 * 1024 * 1024
    total_ms_max: int = 15_000
    url_chars_max: int = 2_048
    addresses_max: int = 16
    allowed_hosts: frozenset[str] = field(default=frozenset())

    @classmethod
    def from_environment(cls) -> FetchRules:
        """The defaults, with the hosts that ENDSTOP_SEO_ALLOW lists (comma separated) allowed to be private."""
        listed = os.environ.get(ALLOW_VARIABLE, "").split(",")
        return cls(allowed_hosts=frozenset(host.strip().lower() for host in listed if host.strip()))

    def allows(self, host: str, port: int) -> bool:
        """Whether this host, at this port, may have an address that is not public."""
        plain = host.lower()
        with_port = f"[{plain}]:{port}" if ":" in plain else f"{plain}:{port}"
        return plain in self.allowed_hosts or with_port in self.allowed_hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirect:
    """One hop: where it was met, its status, and where it led."""

    url: str
    status: int
    to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A page as it came: the body is unpacked bytes, not yet text."""

    url: str
    final_url: str
    status: int
    redirects: tuple[Redirect, ...]
    content_type: str
    header_charset: str | None
    body: bytes


class _Deadline:
    """One point in time for the whole fetch: whoever waits asks how long it may still wait."""

    def __init__(self, total_ms: int) -> None:
        self._total_ms = total_ms
        self._ends_ns = time.monotonic_ns() + total_ms * 1_000_000

    def seconds_left(self) -> float:
        left_ns = self._ends_ns - time.monotonic_ns()
        if left_ns <= 0:
            raise self.exceeded()
        return left_ns / 1e9

    def exceeded(self) -> FetchTimeoutError:
        return FetchTimeoutError(f"fetch stopped: it took longer than {self._total_ms} ms in all")


class _DeadlineStream(httpcore.NetworkStream):
    """A connection on which no single wait, however it is cut in pieces, outlives the fetch's deadline."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: _Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        del timeout  # the deadline of the whole fetch is the only clock
        return self._stream.read(max_bytes, self._deadline.seconds_left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        del timeout
        self._stream.write(buffer, self._deadline.seconds_left())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        del timeout
        secured = self._stream.start_tls(ssl_context, server_hostname, self._deadline.seconds_left())
        return _DeadlineStream(secured, self._deadline)

    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)


class _CheckedBackend(httpcore.NetworkBackend):
    """The only place where a connection is made: resolve, judge every address, connect to a judged one."""

    def __init__(self, rules: FetchRules, deadline: _Deadline, resolve: Resolve) -> None:
        self._rules = rules
        self._deadline = deadline
        self._resolve = resolve
        self._sockets = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: _SocketOptions | None = None,
    ) -> httpcore.NetworkStream:
        del timeout
        addresses = self._checked_addresses(host, port)
        failure: httpcore.ConnectError | None = None
        for address in addresses:
            try:
                stream = self._sockets.connect_tcp(
                    address, port, self._deadline.seconds_left(), local_address, socket_options
                )
            except httpcore.ConnectError as error:
                failure = error
            else:
                return _DeadlineStream(stream, self._deadline)
        msg = f"connection to host {shown(host)!r} port {port} failed: no answer from {len(addresses)} address(es)"
        raise ConnectionFailedError(msg) from failure

    def _checked_addresses(self, host: str, port: int) -> Sequence[str]:
        addresses = self._resolved(host, port)
        if not addresses or len(addresses) > self._rules.addresses_max:
            most = self._rules.addresses_max
            msg = f"host {shown(host)!r} refused: {len(addresses)} addresses, allowed are 1 to {most}"
            raise AddressRefusedError(msg)
        if self._rules.allows(host, port):
            return addresses
        for address in addresses:
            reason = refused_as(address)
            if reason is not None:
                msg = (
                    f"host {shown(host)!r} refused: it resolves to {shown(address)}, which is {reason}; "
                    f"if this host may be fetched, add it to {ALLOW_VARIABLE}"
                )
                raise AddressRefusedError(msg)
        return addresses

    def _resolved(self, host: str, port: int) -> Sequence[str]:
        # getaddrinfo knows no time limit, so it runs in a thread that is abandoned (daemon) when time is up.
        answers: queue.SimpleQueue[Sequence[str] | OSError | UnicodeError] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(self._resolve(host, port))
            except (OSError, UnicodeError) as error:
                answers.put(error)

        threading.Thread(target=ask, name="endstop-examples-resolve", daemon=True).start()
        try:
            answer = answers.get(timeout=self._deadline.seconds_left())
        except queue.Empty:
            raise self._deadline.exceeded() from None
        if isinstance(answer, OSError | UnicodeError):
            msg = f"host {shown(host)!r} could not be resolved; check its spelling"
            raise NameUnresolvedError(msg) from answer
        return answer


@contextmanager
def _named_failures(deadline: _Deadline) -> Iterator[None]:
    """Turn the HTTP layer's errors into ours. Their texts may quote the peer's bytes, so only their kind is kept."""
    try:
        yield
    except (httpcore.TimeoutException, httpx.TimeoutException) as error:
        raise deadline.exceeded() from error
    except (httpcore.NetworkError, httpcore.ProtocolError, httpx.TransportError, httpx.DecodingError) as error:
        msg = f"connection failed: {type(error).__name__}"
        raise ConnectionFailedError(msg) from None


class _BodyStream(httpx.SyncByteStream):
    def __init__(self, stream: Iterable[bytes], close: Callable[[], None], deadline: _Deadline) -> None:
        self._stream = stream
        self._close = close
        self._deadline = deadline

    def __iter__(self) -> Iterator[bytes]:
        with _named_failures(self._deadline):
            yield from self._stream

    def close(self) -> None:
        self._close()


class CheckedTransport(httpx.BaseTransport):
    """An httpx transport whose every connection goes through the address check and the deadline."""

    def __init__(self, rules: FetchRules, deadline: _Deadline, resolve: Resolve) -> None:
        self._deadline = deadline
        self._pool = httpcore.ConnectionPool(
            ssl_context=httpx.create_ssl_context(),
            network_backend=_CheckedBackend(rules, deadline, resolve),
            max_connections=1,
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request. Raises only FetchError classes."""
        url = httpcore.URL(
            scheme=request.url.raw_scheme,
            host=request.url.raw_host,
            port=request.url.port,
            target=request.url.raw_path,
        )
        with _named_failures(self._deadline):
            answer = self._pool.handle_request(
                httpcore.Request(method=request.method, url=url, headers=request.headers.raw)
            )
        if not isinstance(answer.stream, Iterable):
            msg = "connection failed: the HTTP layer gave no readable body"
            raise ConnectionFailedError(msg)
        stream = _BodyStream(answer.stream, answer.close, self._deadline)
        # httpx builds the next request from a Location header even when it is told not to follow it, and fails on
        # some hostile ones. The header is kept out of its sight; redirects are this module's own business.
        headers = [(name, value) for name, value in answer.headers if name.lower() != b"location"]
        targets = [value for name, value in answer.headers if name.lower() == b"location"]
        return httpx.Response(answer.status, headers=headers, stream=stream, extensions={LOCATIONS: targets})

    def close(self) -> None:
        """Close the connection."""
        self._pool.close()


def fetch_html(url: str, rules: FetchRules, *, resolve: Resolve = resolve_host) -> Fetched:
    """Fetch one HTML page within `rules`.

    A page with an error status is an answer, not a failure; if such an answer is not HTML its body is left out.
    Raises a FetchError class for everything that is refused or fails; nothing is kept then.
    """
    deadline = _Deadline(rules.total_ms_max)
    hops: list[Redirect] = []
    current = _checked_url(url, rules)
    with httpx.Client(
        transport=CheckedTransport(rules, deadline, resolve),
        headers=REQUEST_HEADERS,
        follow_redirects=False,
        trust_env=False,
    ) as client:
        while True:
            with _named_failures(deadline), client.stream("GET", current) as response:
                if response.status_code not in REDIRECT_STATUSES:
                    return _answer(url, current, response, tuple(hops), rules)
                target = _redirect_target(current, response, rules)
            hops.append(Redirect(url=current, status=response.status_code, to=target))
            if len(hops) > rules.redirects_max:
                msg = f"fetch of {_place(url)} refused: more than {rules.redirects_max} redirects"
                raise RedirectRefusedError(msg)
            current = target


def _checked_url(url: str, rules: FetchRules) -> str:
    if len(url) > rules.url_chars_max:
        msg = f"URL refused: longer than {rules.url_chars_max} characters"
        raise UrlRefusedError(msg)
    try:
        parsed = httpx.URL(url)
        port = parsed.port
    except (httpx.InvalidURL, ValueError) as error:
        msg = "URL refused: it is malformed; give an absolute http or https URL"
        raise UrlRefusedError(msg) from error
    if parsed.scheme not in ("http", "https") or not parsed.host or port == 0:
        msg = f"URL refused: scheme {shown(parsed.scheme)!r}; give an absolute http or https URL with a host"
        raise UrlRefusedError(msg)
    if parsed.userinfo:
        msg = f"URL refused: it carries credentials for host {shown(parsed.host)!r}; leave them out"
        raise UrlRefusedError(msg)
    return str(parsed.copy_with(fragment=None))


def _redirect_target(current: str, response: httpx.Response, rules: FetchRules) -> str:
    locations: list[bytes] = response.extensions[LOCATIONS]
    location = locations[0].decode("utf-8", "replace").strip() if locations else ""
    if not location:
        msg = f"redirect of {_place(current)} refused: status {response.status_code} without a location"
        raise RedirectRefusedError(msg)
    try:
        target = urljoin(current, location)
    except ValueError as error:
        msg = f"redirect of {_place(current)} refused: its location is malformed"
        raise RedirectRefusedError(msg) from error
    return _checked_url(target, rules)


def _place(url: str) -> str:
    """Host and path of a URL for a message: a query may carry secrets and is left out."""
    parts = urlsplit(url)
    return shown(f"{parts.scheme}://{parts.hostname or ''}{parts.path}")


def _answer(
    url: str, final_url: str, response: httpx.Response, hops: tuple[Redirect, ...], rules: FetchRules
) -> Fetched:
    content_type, _, parameters = response.headers.get("content-type", "").partition(";")
    content_type = content_type.strip().lower()
    is_html = content_type in HTML_TYPES
    if not is_html and response.status_code < 400:  # noqa: PLR2004 - where HTTP's error statuses begin
        msg = (
            f"page {_place(final_url)} refused: content type {shown(content_type or 'missing')!r} is not HTML; "
            "leave this URL out"
        )
        raise ContentTypeRefusedError(msg)
    return Fetched(
        url=url,
        final_url=final_url,
        status=response.status_code,
        redirects=hops,
        content_type=content_type,
        header_charset=_charset_of(parameters),
        body=_body(final_url, response, rules) if is_html else b"",
    )


def _charset_of(parameters: str) -> str | None:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip("\"'") or None
    return None


def _body(final_url: str, response: httpx.Response, rules: FetchRules) -> bytes:
    packing = response.headers.get("content-encoding", "identity").strip().lower()
    if packing not in ("identity", "gzip", "x-gzip", ""):
        msg = f"page {_place(final_url)} refused: content encoding {shown(packing)!r} was not asked for"
        raise EncodingRefusedError(msg)
    limit = rules.body_bytes_max
    too_large = BodyTooLargeError(f"page {_place(final_url)} refused: larger than {limit} bytes")
    unpack = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16) if "gzip" in packing else None
    body = bytearray()
    on_wire = 0
    for chunk in response.iter_raw():
        on_wire += len(chunk)
        try:
            # The unpacker may give one byte more than what is left: enough to know, too little to hurt.
            body += chunk if unpack is None else unpack.decompress(chunk, limit - len(body) + 1)
        except zlib.error as error:
            msg = f"page {_place(final_url)} refused: its gzip data is damaged"
            raise EncodingRefusedError(msg) from error
        if max(on_wire, len(body)) > limit:
            raise too_large
    if unpack is not None and not unpack.eof:
        msg = f"page {_place(final_url)} refused: its gzip data is cut off"
        raise EncodingRefusedError(msg)
    return bytes(body)
