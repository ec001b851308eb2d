"""Read what an SEO audit needs from the bytes of one HTML page, however broken the page is.

`read_page` is a pure function. `read_page_apart` runs it in a child process: the HTML5 algorithm takes quadratic time
and memory on hostile nesting, inside C code that nothing can interrupt, so the child gets a memory limit and is ended
when its time is up. This file imports nothing of its own package, because the child runs it as a script.
"""

from __future__ import annotations

import codecs
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from urllib.parse import urldefrag, urljoin, urlsplit

from selectolax.lexbor import LexborHTMLParser, LexborNode

TEXT_CHARS_MAX = 500
H1S_MAX = 20
LINKS_LISTED_MAX = 100
LINKS_READ_MAX = 10_000
IMAGES_LISTED_MAX = 20
META_PRESCAN_BYTES = 1_024
PARSE_MEMORY_BYTES_MAX = 1024 * 1024 * 1024

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
# A closed table (labels as in the WHATWG Encoding Standard): Python's own codec names also cover things that are no
# charsets at all, and some that unpack or run in quadratic time.
_CHARSETS = {
    **dict.fromkeys(("utf-8", "utf8", "unicode-1-1-utf-8"), "utf-8"),
    **dict.fromkeys(
        ("windows-1252", "cp1252", "iso-8859-1", "iso8859-1", "iso_8859-1", "latin1", "latin-1", "ascii", "us-ascii"),
        "cp1252",
    ),
    **{f"windows-{number}": f"cp{number}" for number in (1250, 1251, 1253, 1254, 1255, 1256, 1257, 1258)},
    **{f"iso-8859-{number}": f"iso8859-{number}" for number in (2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 15, 16)},
    **dict.fromkeys(("iso-8859-9", "latin5"), "cp1254"),
    **dict.fromkeys(("gb2312", "gbk", "gb18030", "x-gbk"), "gb18030"),
    **dict.fromkeys(("shift_jis", "shift-jis", "sjis", "windows-31j"), "cp932"),
    **dict.fromkeys(("euc-kr", "ks_c_5601-1987", "windows-949"), "cp949"),
    "big5": "big5hkscs",
    "euc-jp": "euc_jp",
    "iso-2022-jp": "iso2022_jp",
    "koi8-r": "koi8-r",
    "koi8-u": "koi8-u",
    "macintosh": "mac-roman",
    "utf-16": "utf-16-le",
    "utf-16le": "utf-16-le",
    "utf-16be": "utf-16-be",
}
_META_CHARSET = re.compile(rb"""<meta[^>]{0,300}?charset\s*=\s*["']?\s*([A-Za-z0-9_:.-]{1,40})""", re.IGNORECASE)
_FOLLOWED_SCHEMES = ("http", "https")


class PageUnreadableError(Exception):
    """The page could not be read within the limits of time and memory. Its contents are not in the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFacts:
    """What one page says about itself. Texts, lists and their lengths are cut at the named limits of this module."""

    charset: str
    charset_source: str
    lang: str | None
    title: str | None
    titles_count: int
    meta_description: str | None
    meta_robots: str | None
    canonical: str | None
    h1s: tuple[str, ...]
    h1s_count: int
    links_internal: tuple[str, ...]
    links_internal_count: int
    links_external: tuple[str, ...]
    links_external_count: int
    images_count: int
    images_without_alt: tuple[str, ...]
    images_without_alt_count: int
    word_count: int


def decode(body: bytes, header_charset: str | None) -> tuple[str, str, str]:
    """The page as text, the charset it was read with, and where that came from: bom, header, meta or fallback.

    Undecodable bytes become U+FFFD. A charset label that is not known is passed over.
    """
    for mark, codec in _BOMS:
        if body.startswith(mark):
            return body[len(mark) :].decode(codec, "replace"), codec, "bom"
    named = _CHARSETS.get((header_charset or "").strip().lower())
    if named is not None:
        return body.decode(named, "replace"), named, "header"
    found = _META_CHARSET.search(body[:META_PRESCAN_BYTES])
    declared = _CHARSETS.get(found[1].decode("ascii").lower()) if found else None
    if declared is not None:
        # A meta tag that could be read as ASCII cannot truthfully say UTF-16 (WHATWG HTML, prescan).
        codec = "utf-8" if declared.startswith("utf-16") else declared
        return body.decode(codec, "replace"), codec, "meta"
    try:
        return body.decode("utf-8"), "utf-8", "fallback"
    except UnicodeDecodeError:
        return body.decode("cp1252", "replace"), "cp1252", "fallback"


def read_page(body: bytes, *, base_url: str, header_charset: str | None) -> PageFacts:
    """Read the facts of one page. Never fails on broken HTML; takes time and memory that hostile HTML can raise."""
    text, charset, charset_source = decode(body, header_charset)
    tree = LexborHTMLParser(text)
    titles = [node for node in tree.css("title") if _within(node, "head")] or tree.css("title")
    titles = [node for node in titles if not _within(node, "svg")]
    h1s = tree.css("h1")
    links = _Links.of(tree, base_url)
    images = tree.css("img")
    # An empty alt is a statement (decoration); only a missing one is a fault.
    bare = [node for node in images if "alt" not in node.attributes]
    root = tree.root
    return PageFacts(
        charset=charset,
        charset_source=charset_source,
        lang=_clean(root.attributes.get("lang")) if root is not None else None,
        title=_clean(titles[0].text()) if titles else None,
        titles_count=len(titles),
        meta_description=_meta(tree, "description"),
        meta_robots=_meta(tree, "robots"),
        canonical=_canonical(tree, links.base),
        h1s=tuple(_clean(node.text(separator=" ")) or "" for node in h1s[:H1S_MAX]),
        h1s_count=len(h1s),
        links_internal=links.internal[:LINKS_LISTED_MAX],
        links_internal_count=len(links.internal),
        links_external=links.external[:LINKS_LISTED_MAX],
        links_external_count=len(links.external),
        images_count=len(images),
        images_without_alt=tuple(_clean(node.attributes.get("src")) or "" for node in bare[:IMAGES_LISTED_MAX]),
        images_without_alt_count=len(bare),
        word_count=_word_count(tree),  # last: it takes the scripts out of the tree
    )


def _clean(text: str | None) -> str | None:
    """White space folded, cut at the limit; None for nothing."""
    folded = " ".join((text or "").split())
    return folded[:TEXT_CHARS_MAX] or None


def _within(node: LexborNode, tag: str) -> bool:
    parent = node.parent
    while parent is not None:
        if parent.tag == tag:
            return True
        parent = parent.parent
    return False


def _meta(tree: LexborHTMLParser, name: str) -> str | None:
    for node in tree.css("meta"):
        if (node.attributes.get("name") or "").strip().lower() == name:
            return _clean(node.attributes.get("content"))
    return None


def _canonical(tree: LexborHTMLParser, base: str) -> str | None:
    for node in tree.css("link"):
        if "canonical" in (node.attributes.get("rel") or "").lower().split():
            return _clean(_absolute(base, node.attributes.get("href")))
    return None


def _absolute(base: str, href: str | None) -> str | None:
    """The absolute form of a link without its fragment; None for one that is malformed or leads to no page."""
    try:
        joined = urldefrag(urljoin(base, (href or "").strip())).url
        parts = urlsplit(joined)
        usable = parts.scheme in _FOLLOWED_SCHEMES and bool(parts.hostname)
    except ValueError:
        return None
    return joined if usable else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    base: str
    internal: tuple[str, ...]
    external: tuple[str, ...]

    @classmethod
    def of(cls, tree: LexborHTMLParser, base_url: str) -> _Links:
        bases = (_absolute(base_url, node.attributes.get("href")) for node in tree.css("base"))
        base = next((found for found in bases if found is not None), base_url)
        own_host = urlsplit(base_url).netloc.lower()
        found = dict.fromkeys(_hrefs(tree, base))
        internal = tuple(url for url in found if urlsplit(url).netloc.lower() == own_host)
        external = tuple(url for url in found if urlsplit(url).netloc.lower() != own_host)
        return cls(base=base, internal=internal, external=external)


def _hrefs(tree: LexborHTMLParser, base: str) -> Iterator[str]:
    for node in tree.css("a")[:LINKS_READ_MAX]:
        if "href" in node.attributes:
            url = _absolute(base, node.attributes.get("href"))
            if url is not None:
                yield url[:TEXT_CHARS_MAX]


def _word_count(tree: LexborHTMLParser) -> int:
    for node in tree.css("script, style, noscript, template"):
        node.decompose()
    body = tree.body
    return 0 if body is None else len(body.text(separator=" ").split())


def read_page_apart(body: bytes, *, base_url: str, header_charset: str | None, time_ms_max: int) -> dict[str, object]:
    """`read_page` in a child process, as plain JSON values.

    Raises PageUnreadableError when the page takes more than `time_ms_max` milliseconds or more memory than allowed.
    """
    request = json.dumps({"base_url": base_url, "header_charset": header_charset}).encode() + b"\n" + body
    command = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(  # noqa: S603 - the command is this file; the page goes in as bytes, never as an argument
            command, input=request, capture_output=True, timeout=time_ms_max / 1000, check=False
        )
    except subprocess.TimeoutExpired:
        msg = f"page unreadable: its HTML takes more than {time_ms_max} ms to read; leave this URL out"
        raise PageUnreadableError(msg) from None
    if done.returncode != 0:
        msg = f"page unreadable: reading its HTML ended with code {done.returncode} (memory limit, or a parser fault)"
        raise PageUnreadableError(msg)
    facts: dict[str, object] = json.loads(done.stdout)
    return facts


def _limit_memory() -> None:
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        within = hard != resource.RLIM_INFINITY and hard < PARSE_MEMORY_BYTES_MAX
        resource.setrlimit(resource.RLIMIT_AS, (hard if within else PARSE_MEMORY_BYTES_MAX, hard))


def _serve_one_page() -> None:
    _limit_memory()
    request = json.loads(sys.stdin.buffer.readline())
    facts = read_page(sys.stdin.buffer.read(), base_url=request["base_url"], header_charset=request["header_charset"])
    json.dump(asdict(facts), sys.stdout)


if __name__ == "__main__":
    _serve_one_page()
