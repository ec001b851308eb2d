"""The fetch leaves for checked addresses only and reads nothing past a limit. Real HTTP on loopback."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("httpx", reason="NOT TESTED: the fetch needs httpx, install endstop[examples]")

import httpcore

from endstop_examples import fetch
from endstop_examples.fetch import FetchRules, fetch_html
from tests.examples.peer import Behaviour, Peer, response, serve

PAGE = b"<title>Page</title><p>secret words</p>"


def allow(*peers: Peer, **limits: int) -> FetchRules:
    return FetchRules(allowed_hosts=frozenset(peer.netloc for peer in peers), **limits)


def test_an_allowed_page_comes_back_with_its_status_type_and_bytes() -> None:
    with serve({"/a": response(PAGE, content_type="Text/HTML; Charset='ISO-8859-1'")}) as peer:
        page = fetch_html(f"{peer.url}/a#part", allow(peer))
    assert (page.status, page.content_type, page.header_charset, page.body) == (200, "text/html", "ISO-8859-1", PAGE)
    assert page.redirects == ()
    assert page.final_url == f"{peer.url}/a"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "0x7f.1", "2130706433", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"]
)
def test_a_private_address_is_refused_however_it_is_spelled(host: str) -> None:
    with serve({"/": response(PAGE)}) as peer, pytest.raises(fetch.AddressRefusedError):
        fetch_html(f"http://{host}:{peer.port}/", FetchRules())
    assert peer.seen == []


def test_one_private_address_among_public_ones_refuses_the_host() -> None:
    def resolve(host: str, port: int) -> Sequence[str]:
        return ["93.184.216.34", "10.0.0.7"]

    with pytest.raises(fetch.AddressRefusedError, match=r"10\.0\.0\.7, which is private"):
        fetch_html("http://mixed.test/", FetchRules(), resolve=resolve)


def test_more_addresses_than_the_limit_and_no_address_at_all_are_refused() -> None:
    answers: list[list[str]] = [["93.184.216.34"] * 17, []]
    for _ in range(2):
        with pytest.raises(fetch.AddressRefusedError, match="1 to 16"):
            fetch_html("http://many.test/", FetchRules(), resolve=lambda host, port: answers.pop())


def test_the_connection_goes_to_the_checked_address_so_a_name_that_changes_meaning_gains_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected: list[str] = []
    answers = iter([["93.184.216.34"], ["127.0.0.1"]])

    class Recorder(httpcore.SyncBackend):
        def connect_tcp(self, host: str, *args: object, **options: object) -> httpcore.NetworkStream:
            connected.append(host)
            raise httpcore.ConnectError

    monkeypatch.setattr(httpcore, "SyncBackend", Recorder)
    with pytest.raises(fetch.ConnectionFailedError):
        fetch_html("http://rebinding.test/", FetchRules(), resolve=lambda host, port: next(answers))
    assert connected == ["93.184.216.34"]


def test_an_allowed_name_is_reached_at_its_resolved_address_under_its_own_host_header() -> None:
    with serve({"/": response(PAGE)}) as peer:
        rules = FetchRules(allowed_hosts=frozenset({"shop.test"}))
        fetch_html(f"http://shop.test:{peer.port}/", rules, resolve=lambda host, port: ["127.0.0.1"])
    assert f"host: shop.test:{peer.port}" in peer.seen[0].lower()


def test_an_allow_list_entry_with_a_port_opens_no_other_port() -> None:
    rules = FetchRules(allowed_hosts=frozenset({"127.0.0.1:80", "[::1]:80"}))
    assert rules.allows("127.0.0.1", 80)
    assert rules.allows("::1", 80)
    assert not rules.allows("127.0.0.1", 81)
    assert not rules.allows("127.0.0.11", 80)


def test_the_allow_list_of_the_environment_is_read_with_blanks_and_capitals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDSTOP_SEO_ALLOW", " LocalHost , ,127.0.0.1:8731")
    assert FetchRules.from_environment().allowed_hosts == frozenset({"localhost", "127.0.0.1:8731"})
    monkeypatch.delenv("ENDSTOP_SEO_ALLOW")
    assert FetchRules.from_environment().allowed_hosts == frozenset()


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve({"/": response(PAGE)}) as peer, serve({"/": response(b"proxy")}) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        assert fetch_html(f"{peer.url}/", allow(peer)).body == PAGE
    assert proxy.seen == []


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1/",
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
        "//127.0.0.1/",
        "page.html",
        "http:///page",
        "http://user:word@127.0.0.1/",
        "http://127.0.0.1:0/",
        "http://127.0.0.1:port/",
        "http://\x00/",
        "http://127.0.0.1/" + "a" * 2_048,
        "",
    ],
)
def test_a_url_that_is_not_plain_http_is_refused_before_anything_is_sent(url: str) -> None:
    def resolve(host: str, port: int) -> Sequence[str]:
        raise AssertionError(host)

    with pytest.raises(fetch.UrlRefusedError) as refusal:
        fetch_html(url, FetchRules(), resolve=resolve)
    assert "word" not in str(refusal.value)


def test_redirects_are_followed_by_hand_and_listed_in_their_order() -> None:
    answers: dict[str, bytes | Behaviour] = {
        "/1": response(status="302 Found", Location="2"),
        "/2": response(status="308 Permanent Redirect", Location="/3?q=1"),
        "/3?q=1": response(PAGE),
    }
    with serve(answers) as peer:
        page = fetch_html(f"{peer.url}/1", allow(peer))
    assert [(hop.status, hop.to) for hop in page.redirects] == [(302, f"{peer.url}/2"), (308, f"{peer.url}/3?q=1")]
    assert (page.url, page.final_url, page.body) == (f"{peer.url}/1", f"{peer.url}/3?q=1", PAGE)


def test_a_redirect_to_a_private_address_is_refused_and_nothing_is_sent_there() -> None:
    with serve({"/": response(PAGE)}) as inner:
        outer_answer = response(status="302 Found", Location=f"http://127.0.0.1:{inner.port}/")
        with serve({"/": outer_answer}) as outer, pytest.raises(fetch.AddressRefusedError, match="loopback"):
            fetch_html(f"{outer.url}/", allow(outer))
        assert len(outer.seen) == 1
    assert inner.seen == []


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "ftp://x/", "http://u:p@127.0.0.1/", "http://[bad", "javascript:1"]
)
def test_a_redirect_to_something_else_than_plain_http_is_refused(location: str) -> None:
    with serve({"/": response(status="301 Moved", Location=location)}) as peer, pytest.raises(fetch.FetchError):
        fetch_html(f"{peer.url}/", allow(peer))
    assert len(peer.seen) == 1


def test_a_redirect_without_a_location_is_refused() -> None:
    with serve({"/": response(status="301 Moved")}) as peer, pytest.raises(fetch.RedirectRefusedError, match="without"):
        fetch_html(f"{peer.url}/", allow(peer))


def test_a_circle_of_redirects_ends_at_the_limit() -> None:
    with serve({"/": response(status="301 Moved", Location="/")}) as peer:
        with pytest.raises(fetch.RedirectRefusedError, match="more than 3"):
            fetch_html(f"{peer.url}/", allow(peer, redirects_max=3))
        assert len(peer.seen) == 4


@pytest.mark.parametrize("content_type", ["text/plain", "application/json", "image/png", "text/htmlx", None, ""])
def test_an_answer_that_is_not_html_is_refused_without_quoting_it(content_type: str | None) -> None:
    with (
        serve({"/": response(PAGE, content_type=content_type)}) as peer,
        pytest.raises(fetch.ContentTypeRefusedError) as refusal,
    ):
        fetch_html(f"{peer.url}/", allow(peer))
    assert "secret" not in str(refusal.value)


def test_an_error_status_is_an_answer_and_its_body_is_read_only_if_it_is_html() -> None:
    answers: dict[str, bytes | Behaviour] = {
        "/html": response(PAGE, status="404 Not Found"),
        "/text": response(PAGE, status="500 Oops", content_type="text/plain"),
    }
    with serve(answers) as peer:
        assert fetch_html(f"{peer.url}/html", allow(peer)).body == PAGE
        page = fetch_html(f"{peer.url}/text", allow(peer))
    assert (page.status, page.body) == (500, b"")


@pytest.mark.parametrize("length", [True, False])
def test_a_body_above_the_limit_is_refused_and_one_at_the_limit_is_not(length: bool) -> None:
    answers: dict[str, bytes | Behaviour] = {
        "/at": response(b"x" * 1_000, length=length),
        "/above": response(b"x" * 1_001, length=length),
    }
    with serve(answers) as peer:
        assert len(fetch_html(f"{peer.url}/at", allow(peer, body_bytes_max=1_000)).body) == 1_000
        with pytest.raises(fetch.BodyTooLargeError, match="1000 bytes"):
            fetch_html(f"{peer.url}/above", allow(peer, body_bytes_max=1_000))


def test_a_packed_body_is_unpacked_and_a_bomb_is_refused() -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)
    answers: dict[str, bytes | Behaviour] = {
        "/page": response(gzip.compress(PAGE), Content_Encoding="gzip"),
        "/bomb": response(bomb, Content_Encoding="gzip"),
        "/cut": response(gzip.compress(PAGE)[:-9], Content_Encoding="gzip"),
        "/damaged": response(b"no gzip at all", Content_Encoding="gzip"),
        "/strange": response(PAGE, Content_Encoding="br"),
    }
    with serve(answers) as peer:
        assert fetch_html(f"{peer.url}/page", allow(peer)).body == PAGE
        with pytest.raises(fetch.BodyTooLargeError):
            fetch_html(f"{peer.url}/bomb", allow(peer))
        for path in ("/cut", "/damaged", "/strange"):
            with pytest.raises(fetch.EncodingRefusedError):
                fetch_html(f"{peer.url}{path}", allow(peer))


def drip(text: bytes, pause: threading.Event) -> Callable[[Callable[[bytes], None]], None]:
    """A behaviour that sends `text` and then one byte after the other, for as long as the client listens."""

    def behave(send: Callable[[bytes], None]) -> None:
        send(text)
        for _ in range(400):
            if pause.wait(0.02):
                return
            send(b"x")

    return behave


@pytest.mark.parametrize(
    "start", [b"", b"HTTP/1.1 200 OK\r\nA: ", b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n"]
)
def test_a_server_that_drips_bytes_cannot_stretch_the_time_limit(start: bytes) -> None:
    stop = threading.Event()
    with serve({"/": drip(start, stop)}) as peer:
        try:
            with pytest.raises(fetch.FetchTimeoutError, match="300 ms in all"):
                fetch_html(f"{peer.url}/", allow(peer, total_ms_max=300))
        finally:
            stop.set()


def test_a_name_server_that_does_not_answer_cannot_stretch_the_time_limit() -> None:
    release = threading.Event()

    def resolve(host: str, port: int) -> Sequence[str]:
        release.wait(10)
        return []

    try:
        with pytest.raises(fetch.FetchTimeoutError):
            fetch_html("http://slow.test/", FetchRules(total_ms_max=100), resolve=resolve)
    finally:
        release.set()


def test_a_name_that_does_not_exist_is_named_in_the_error() -> None:
    def resolve(host: str, port: int) -> Sequence[str]:
        raise OSError

    with pytest.raises(fetch.NameUnresolvedError, match=r"gone\.test"):
        fetch_html("http://gone.test/", FetchRules(), resolve=resolve)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"secret garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 99\r\n\r\nsecret",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\nsecret",
        b"HTTP/1.1 200 OK\r\nsecret: " + b"y" * 200_000 + b"\r\n\r\n",
    ],
)
def test_an_answer_that_is_no_whole_http_fails_without_quoting_it(answer: bytes) -> None:
    with serve({"/": answer}) as peer, pytest.raises(fetch.ConnectionFailedError) as failure:
        fetch_html(f"{peer.url}/", allow(peer))
    assert "secret" not in str(failure.value)
    assert failure.value.__cause__ is None


def test_a_port_where_nobody_listens_fails_as_a_connection() -> None:
    with serve({}) as peer:
        rules, url = allow(peer), peer.url
    with pytest.raises(fetch.ConnectionFailedError, match="no answer"):
        fetch_html(url, rules)


def test_a_message_leaves_the_query_out_because_it_may_carry_secrets() -> None:
    answers: dict[str, bytes | Behaviour] = {"/p?token=hidden": response(PAGE, content_type="text/plain")}
    with serve(answers) as peer, pytest.raises(fetch.ContentTypeRefusedError) as refusal:
        fetch_html(f"{peer.url}/p?token=hidden", allow(peer))
    assert "hidden" not in str(refusal.value)
    assert "/p" in str(refusal.value)
