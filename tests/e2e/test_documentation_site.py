"""The documentation site builds without a warning and needs nothing from other hosts."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs._tools.site import NAVIGATION, build_site, site_links

ROOT = Path(__file__).resolve().parents[2]


def test_site_builds_without_warnings_complete_and_offline(tmp_path: Path) -> None:
    """One test, because building takes ten seconds."""
    site = tmp_path / "docs"
    assert build_site(ROOT, site) == 0
    pages = {page.rpartition("<")[2].rstrip(">") for group in NAVIGATION.values() for page in group}
    assert {page.stem for page in site.glob("*.html")} >= {*pages, "index"}
    explained = tomllib.loads((ROOT / "docs" / "troubleshooting.toml").read_text())
    troubleshooting = (site / "troubleshooting.html").read_text()
    assert [code for code in explained if f'id="{code}"' not in troubleshooting] == []
    assert troubleshooting.count("<strong>Remedy:</strong>") == len(explained)
    assert list(foreign_assets(site)) == []


def foreign_assets(site: Path) -> Iterator[str]:
    """Yield what pages and style sheets would load from other hosts."""
    for page in site.glob("*.html"):
        loaded = re.findall(r"<(?:link|script|img|iframe|source)\b[^>]*?(?:href|src)=[\"']([^\"']+)", page.read_text())
        yield from (address for address in loaded if re.match(r"(https?:)?//", address))
    for style in site.rglob("*.css"):
        yield from re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//.*", style.read_text())


@pytest.mark.parametrize(
    ("link", "on_site"),
    [
        ("[a](README.md)", "[a](getting-started.md)"),
        ("[a](docs/methods.md#fedavg)", "[a](methods.md#fedavg)"),
        ("[SECURITY.md](SECURITY.md)", "[](security-policy.md)"),
        ("[`Makefile`](Makefile)", "`Makefile`"),
        ("[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("[a](#here)", "[a](#here)"),
    ],
)
def test_links_of_the_repository_lead_to_pages_of_the_site(link: str, on_site: str) -> None:
    assert site_links(link, ROOT, ROOT) == on_site
