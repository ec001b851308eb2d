"""The SEO audit's tools: `crawl_url` (read) and `write_report` (write)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from endstop_examples.confined_files import folder_from_environment, inside, locked, replace_file
from endstop_examples.fetch import FetchRules, fetch_html
from endstop_examples.page import read_page_apart
from endstop_examples.refusals import WriteRefusedError, shown

OUT_VARIABLE = "ENDSTOP_SEO_OUT"
PARSE_MS_MAX = 5_000
FINDINGS_MAX = 200
FINDING_CHARS_MAX = 2_000
FINDING_FIELDS = ("url", "severity", "fault", "advice")
SEVERITIES = ("high", "medium", "low")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault of one page, as it goes into the report."""

    url: str
    severity: str
    fault: str
    advice: str


def crawl_url(url: str) -> dict[str, object]:
    """Fetch one HTML page and tell its title, description, headings, links, images and status.

    `url` is absolute, http or https. Private addresses are refused unless ENDSTOP_SEO_ALLOW lists the host.
    Raises a FetchError class (refused, failed) or PageUnreadableError; neither quotes the page.
    """
    fetched = fetch_html(url, FetchRules.from_environment())
    facts = read_page_apart(
        fetched.body, base_url=fetched.final_url, header_charset=fetched.header_charset, time_ms_max=PARSE_MS_MAX
    )
    return {
        "url": fetched.url,
        "final_url": fetched.final_url,
        "status": fetched.status,
        "redirects": [asdict(hop) for hop in fetched.redirects],
        "content_type": fetched.content_type,
        "body_bytes": len(fetched.body),
        **facts,
    }


def write_report(path: str, findings: list[dict[str, str]]) -> dict[str, object]:
    """Write the audit's findings to a report below the output folder (ENDSTOP_SEO_OUT, default ./out).

    `path` is a relative name that ends in .md or .json. Each finding has url, severity (high, medium, low), fault and,
    if there is any, advice. The name is the report's identity: writing it again replaces the report as a whole, and
    writing the same findings again changes nothing (`changed` is then false). Raises WriteRefusedError or
    InputRefusedError; no file has changed then.
    """
    target = inside(folder_from_environment(OUT_VARIABLE, "out"), path)
    if target.suffix not in (".md", ".json"):
        msg = f"report {shown(path)!r} refused: its name must end in .md or .json"
        raise WriteRefusedError(msg)
    if len(findings) > FINDINGS_MAX:
        msg = f"report {shown(path)!r} refused: {len(findings)} findings, allowed are {FINDINGS_MAX}"
        raise WriteRefusedError(msg)
    checked = [_checked(number, finding) for number, finding in enumerate(findings, start=1)]
    checked.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    data = (_as_markdown(checked) if target.suffix == ".md" else _as_json(checked)).encode()
    with locked(target):
        changed = not target.is_file() or target.read_bytes() != data
        if changed:
            replace_file(target, data)
    return {
        "path": path,
        "findings": len(checked),
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "changed": changed,
    }


def _checked(number: int, finding: dict[str, str]) -> Finding:
    given: Mapping[str, object] = finding  # a model may send anything, whatever the schema says
    texts: dict[str, str] = {}
    for name in FINDING_FIELDS:
        text = given.get(name, "")
        if not isinstance(text, str) or len(text) > FINDING_CHARS_MAX:
            msg = f"finding {number} refused: {name} must be text of up to {FINDING_CHARS_MAX} characters"
            raise WriteRefusedError(msg)
        texts[name] = text
    if set(given) - set(FINDING_FIELDS):
        msg = f"finding {number} refused: it has other fields than {', '.join(FINDING_FIELDS)}"
        raise WriteRefusedError(msg)
    if texts["severity"] not in SEVERITIES or not texts["url"].strip() or not texts["fault"].strip():
        msg = f"finding {number} refused: url or fault is blank, or severity is none of {', '.join(SEVERITIES)}"
        raise WriteRefusedError(msg)
    return Finding(**texts)


def _as_json(findings: list[Finding]) -> str:
    return json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2, ensure_ascii=False) + "\n"


def _as_markdown(findings: list[Finding]) -> str:
    lines = ["# SEO audit", "", f"{len(findings)} finding(s).", "", "| severity | page | fault | advice |"]
    lines.append("|---|---|---|---|")
    lines.extend(
        f"| {finding.severity} | {_cell(finding.url)} | {_cell(finding.fault)} | {_cell(finding.advice)} |"
        for finding in findings
    )
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    # Findings quote foreign pages: nothing in them may end the cell or become markup in a viewer.
    folded = " ".join(text.split())
    return folded.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("`", "&#96;")
