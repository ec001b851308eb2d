"""The page reader gets the facts out of HTML however broken, and hostile HTML cannot hold it."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

pytest.importorskip("selectolax", reason="NOT TESTED: reading pages needs selectolax, install endstop[examples]")

from hypothesis import given
from hypothesis import strategies as st

from endstop_examples import page
from endstop_examples.page import PageFacts, decode, read_page, read_page_apart

BASE = "http://shop.test/dir/page.html"


def read(html: str) -> PageFacts:
    return read_page(html.encode(), base_url=BASE, header_charset="utf-8")


def test_the_facts_of_a_whole_page_are_read() -> None:
    facts = read(
        """<!doctype html><html lang=en><head><title> A  &amp; B\n</title><meta name=Description content=" d ">
        <meta name=robots content=noindex><link rel="alternate canonical" href=/c></head>
        <body><h1>One</h1><h1>Two <b>parts</b></h1><p>three more words<script>not these</script>
        <img src=a.png><img src=b.png alt=""><img src=c.png alt=C></body></html>"""
    )
    assert (facts.lang, facts.title, facts.meta_description, facts.meta_robots) == ("en", "A & B", "d", "noindex")
    assert facts.canonical == "http://shop.test/c"
    assert (facts.h1s, facts.h1s_count) == (("One", "Two parts"), 2)
    assert (facts.images_count, facts.images_without_alt, facts.images_without_alt_count) == (3, ("a.png",), 1)
    assert facts.word_count == 6


def test_an_empty_page_has_no_facts_and_does_not_fail() -> None:
    facts = read("")
    assert (facts.title, facts.lang, facts.h1s, facts.word_count, facts.links_internal_count) == (None, None, (), 0, 0)


def test_links_are_absolute_without_fragments_listed_once_and_parted_by_host() -> None:
    facts = read(
        """<a href=a.html>1</a><a href="/dir/a.html#x">2</a><a href="//shop.test/b">3</a>
        <a href="https://other.test/">4</a><a href="http://shop.test:8080/">5</a><a href="mailto:x@y">6</a>
        <a href="javascript:1">7</a><a>8</a><a href>9</a><a href="http://[broken">10</a><a href="  /c  ">11</a>"""
    )
    assert facts.links_internal == (
        "http://shop.test/dir/a.html",
        "http://shop.test/b",
        BASE,
        "http://shop.test/c",
    )
    assert facts.links_external == ("https://other.test/", "http://shop.test:8080/")


def test_a_base_element_moves_relative_links_but_not_the_own_host() -> None:
    facts = read('<base href="http://cdn.test/x/"><a href=a>1</a><a href="http://shop.test/b">2</a>')
    assert (facts.links_internal, facts.links_external) == (("http://shop.test/b",), ("http://cdn.test/x/a",))


def test_lists_are_cut_at_their_limit_and_counts_are_not() -> None:
    facts = read("".join(f"<a href=/{n}>x</a><img src={n}><h1>{n}</h1>" for n in range(300)))
    assert (len(facts.links_internal), facts.links_internal_count) == (page.LINKS_LISTED_MAX, 300)
    assert (len(facts.images_without_alt), facts.images_without_alt_count) == (page.IMAGES_LISTED_MAX, 300)
    assert (len(facts.h1s), facts.h1s_count) == (page.H1S_MAX, 300)


def test_long_texts_are_cut() -> None:
    facts = read(f"<title>{'t' * 9_000}</title><h1>{'h' * 9_000}</h1><a href=/{'l' * 9_000}>x</a>")
    assert len(facts.title or "") == len(facts.h1s[0]) == len(facts.links_internal[0]) == page.TEXT_CHARS_MAX


def test_the_title_of_a_drawing_is_not_the_title_of_the_page() -> None:
    assert read("<body><svg><title>drawing</title></svg>").title is None


def test_broken_html_still_gives_its_facts() -> None:
    facts = read("<title>T</title><h1>one</h2><table><tr><a href=/x><b><a href=/y>y</b><p><img src=i<!-- never closed")
    assert (facts.title, facts.h1s_count) == ("T", 1)
    assert facts.links_internal == ("http://shop.test/x", "http://shop.test/y")


@pytest.mark.parametrize(
    ("body", "header", "text", "charset", "source"),
    [
        (b"\xef\xbb\xbfcaf\xc3\xa9", "iso-8859-1", "café", "utf-8", "bom"),
        (b"\xff\xfec\x00\xe9\x00", None, "cé", "utf-16-le", "bom"),
        (b"\xfe\xff\x00c\x00\xe9", None, "cé", "utf-16-be", "bom"),
        (b"caf\xe9 \x93", "ISO-8859-1", "café “", "cp1252", "header"),
        (b"\xc4\xc1", "KOI8-R", "да", "koi8-r", "header"),
        (b"<meta charset=windows-1251>\xef", "no-such", "<meta charset=windows-1251>п", "cp1251", "meta"),
        (b"<meta http-equiv=x content='text/html; charset=\"iso-8859-1\"'>\xe9", None, None, "cp1252", "meta"),
        (b"<meta charset=utf-16>\xc3\xa9", None, "<meta charset=utf-16>é", "utf-8", "meta"),
        (b"caf\xc3\xa9", None, "café", "utf-8", "fallback"),
        (b"caf\xe9", None, "café", "cp1252", "fallback"),
        (b" " * 2_000 + b"<meta charset=koi8-r>\xe9", None, None, "cp1252", "fallback"),
    ],
)
def test_the_charset_is_taken_from_mark_header_meta_or_guess_in_this_order(
    body: bytes, header: str | None, text: str | None, charset: str, source: str
) -> None:
    decoded, used, found_in = decode(body, header)
    assert (used, found_in) == (charset, source)
    assert text is None or decoded == text


@pytest.mark.parametrize(
    "label", ["rot13", "hex", "zip", "bz2", "idna", "punycode", "unicode_escape", "utf-7", "base64"]
)
def test_a_codec_that_is_no_charset_of_the_web_is_never_used(label: str) -> None:
    body = f"<meta charset={label}>+AGE- \\u0041".encode()
    assert decode(body, label) == (body.decode(), "utf-8", "fallback")


def test_every_listed_charset_exists() -> None:
    for label in page._CHARSETS:
        assert decode(b"a\xff\xfe", label)[2] == "header"


@given(st.binary(max_size=2_000), st.one_of(st.none(), st.sampled_from(sorted(page._CHARSETS)), st.text(max_size=20)))
def test_any_bytes_are_read_into_facts_that_json_can_hold(body: bytes, header: str | None) -> None:
    facts = read_page(body, base_url=BASE, header_charset=header)
    json.dumps(asdict(facts)).encode("ascii")


PIECES = """<a href='|'>|<base href=|<title>|</title>|<h1>|</h1>|<svg>|</svg>|<table>|<td>|<b x=1>|<p>|</p>|</b>
|<template>|<!--|-->|<![CDATA[|&#xD800;|&#0;|&amp|//[|http://|é|<img alt|<img src=x>|<meta name=description content=
|<script>|</script>|<plaintext>|<select>| |\0"""
FRAGMENTS = st.sampled_from(PIECES.split("|"))


@given(st.lists(FRAGMENTS, max_size=60))
def test_any_mixture_of_markup_is_read_and_counts_agree_with_lists(fragments: list[str]) -> None:
    facts = read("".join(fragments))
    assert facts.h1s_count >= len(facts.h1s)
    assert facts.images_count >= facts.images_without_alt_count >= len(facts.images_without_alt)
    assert all(link.startswith(("http://", "https://")) for link in facts.links_internal + facts.links_external)
    assert facts.word_count >= 0


def test_the_child_process_reads_the_same_facts() -> None:
    body = "<title>Café</title><a href=x>y</a>".encode("latin-1")
    apart = read_page_apart(body, base_url=BASE, header_charset="latin1", time_ms_max=20_000)
    assert apart == json.loads(json.dumps(asdict(read_page(body, base_url=BASE, header_charset="latin1"))))


def test_a_page_nested_to_take_minutes_is_given_up_in_time() -> None:
    body = b"<div>" * 400_000 + b"secret"
    with pytest.raises(page.PageUnreadableError, match="more than 700 ms") as failure:
        read_page_apart(body, base_url=BASE, header_charset=None, time_ms_max=700)
    assert "secret" not in str(failure.value)


@pytest.mark.slow
def test_a_page_that_multiplies_in_memory_is_given_up() -> None:
    # Every new paragraph closes the row of open formatting elements and builds it again.
    open_tags = b"<p>" + b"".join(b"<b a=%d>" % number for number in range(2_000))
    with pytest.raises(page.PageUnreadableError):
        read_page_apart(open_tags + b"<p>x" * 200_000, base_url=BASE, header_charset=None, time_ms_max=5_000)
