"""The SEO tools on the shipped site, served on loopback."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="NOT TESTED: the SEO tools need httpx, install endstop[examples]")
pytest.importorskip("selectolax", reason="NOT TESTED: the SEO tools need selectolax, install endstop[examples]")

from endstop_examples import fetch
from endstop_examples.refusals import InputRefusedError, WriteRefusedError
from endstop_examples.seo import FINDINGS_MAX, crawl_url, write_report
from endstop_examples.site import serve_site

FINDING = {"url": "http://x.test/", "severity": "low", "fault": "No alt text."}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serve_site() as url:
        monkeypatch.setenv("ENDSTOP_SEO_ALLOW", url.removeprefix("http://"))
        yield url


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENDSTOP_SEO_OUT", str(tmp_path / "out"))
    return tmp_path / "out"


def test_the_home_page_is_crawled_with_its_links_and_its_faults(site: str) -> None:
    page = crawl_url(f"{site}/")
    assert page["status"] == 200
    assert page["title"] == "Harbour Street Cycles: repairs and rentals by the harbour"
    assert page["images_without_alt"] == ["shopfront.jpg"]
    assert page["links_internal_count"] == 11
    assert page["links_external"] == ["https://example.org/cycling"]
    json.dumps(page)


def test_every_fault_that_the_site_has_is_seen(site: str) -> None:
    assert crawl_url(f"{site}/about.html")["title"] is None
    assert crawl_url(f"{site}/workshop.html")["h1s"] == ["Workshop courses", "Dates"]
    assert crawl_url(f"{site}/workshop.html")["lang"] is None
    descriptions = [crawl_url(f"{site}/{name}.html")["meta_description"] for name in ("repairs", "rentals")]
    assert descriptions[0] == descriptions[1] is not None
    assert crawl_url(f"{site}/hidden.html")["meta_robots"] == "noindex, nofollow"
    assert crawl_url(f"{site}/hidden.html")["canonical"] == "http://www.example.org/summer-sale"
    assert crawl_url(f"{site}/missing.html")["status"] == 404


def test_the_latin_1_page_is_read_in_its_own_charset(site: str) -> None:
    page = crawl_url(f"{site}/cafe.html")
    assert (page["charset"], page["charset_source"]) == ("cp1252", "meta")
    assert page["h1s"] == ["Café Dérailleur"]


def test_the_broken_page_still_gives_its_facts(site: str) -> None:
    page = crawl_url(f"{site}/broken.html")
    assert page["title"] == "Opening hours"
    assert page["links_internal"] == [f"{site}/rentals.html", f"{site}/repairs.html"]


def test_redirects_of_the_site_are_told_hop_by_hop(site: str) -> None:
    page = crawl_url(f"{site}/old-old-repairs")
    assert page["final_url"] == f"{site}/repairs.html"
    assert page["redirects"] == [
        {"url": f"{site}/old-old-repairs", "status": 301, "to": f"{site}/old-repairs"},
        {"url": f"{site}/old-repairs", "status": 301, "to": f"{site}/repairs.html"},
    ]


def test_the_text_file_and_the_big_page_are_refused(site: str) -> None:
    with pytest.raises(fetch.ContentTypeRefusedError):
        crawl_url(f"{site}/prices.txt")
    with pytest.raises(fetch.BodyTooLargeError):
        crawl_url(f"{site}/archive.html")


def test_without_the_allow_list_the_local_site_is_refused(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENDSTOP_SEO_ALLOW")
    with pytest.raises(fetch.AddressRefusedError, match="ENDSTOP_SEO_ALLOW"):
        crawl_url(f"{site}/")


def test_the_same_page_crawled_twice_gives_the_same_answer(site: str) -> None:
    assert crawl_url(f"{site}/about.html") == crawl_url(f"{site}/about.html")


def test_leaving_the_site_ends_its_threads_and_frees_its_port() -> None:
    before = set(threading.enumerate())
    with serve_site() as url, urllib.request.urlopen(url) as answer:
        assert answer.status == 200
    assert set(threading.enumerate()) <= before
    with serve_site(int(url.rpartition(":")[2])) as again:
        assert again == url


def test_a_report_lists_the_worst_first_and_quotes_no_markup(out: Path) -> None:
    worst = {"url": "http://x.test/a|b", "severity": "high", "fault": "Title <script>\n`x`", "advice": "Set one."}
    answer = write_report("audit.md", [FINDING, worst])
    text = (out / "audit.md").read_text()
    assert text.index("high") < text.index("low")
    assert "| high | http://x.test/a&#124;b | Title &lt;script> &#96;x&#96; | Set one. |" in text
    assert (answer["findings"], answer["changed"], answer["bytes"]) == (2, True, len(text.encode()))


def test_writing_the_same_report_again_changes_nothing_and_another_replaces_it(out: Path) -> None:
    first = write_report("audit.json", [FINDING])
    again = write_report("audit.json", [FINDING])
    assert (first["changed"], again["changed"], first["sha256"]) == (True, False, again["sha256"])
    write_report("audit.json", [])
    assert json.loads((out / "audit.json").read_text()) == {"findings": []}
    assert sorted(entry.name for entry in out.iterdir()) == ["audit.json", "audit.json.lock"]


@pytest.mark.parametrize("path", ["../audit.md", "/tmp/audit.md", "audit.html", "audit", ""])
def test_a_report_outside_its_folder_or_of_another_kind_is_refused(out: Path, path: str) -> None:
    with pytest.raises((InputRefusedError, WriteRefusedError)):
        write_report(path, [FINDING])
    assert not out.exists()


@pytest.mark.parametrize(
    "finding",
    [
        {},
        FINDING | {"severity": "dreadful"},
        FINDING | {"url": " "},
        FINDING | {"fault": ""},
        FINDING | {"fault": "x" * 2_001},
        FINDING | {"extra": "x"},
        FINDING | {"fault": 7},
    ],
)
def test_a_malformed_finding_is_refused_by_its_number(out: Path, finding: dict[str, str]) -> None:
    with pytest.raises(WriteRefusedError, match="finding 2"):
        write_report("audit.md", [FINDING, finding])
    assert not out.exists()


def test_more_findings_than_the_limit_are_refused(out: Path) -> None:
    with pytest.raises(WriteRefusedError, match=str(FINDINGS_MAX)):
        write_report("audit.md", [FINDING] * (FINDINGS_MAX + 1))
