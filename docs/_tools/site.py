"""Build the documentation site: Markdown pages from the repository, generated parts, then Sphinx."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from docs._tools.api_reference import agent_document, coordinator_document, render_api
from docs._tools.troubleshooting import render_error_codes

# Files at the top of the repository, and their names on the site.
ROOT_PAGES = {
    "README.md": "getting-started.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
}
NAVIGATION = {
    "Start": ("Getting started <getting-started>", "glossary", "troubleshooting"),
    "Guides": ("operator-guide", "deployment", "site-guide", "predict-api", "rest-api"),
    "Reference": ("plan-reference", "coordinator-api", "agent-api", "python-reference"),
    "Learning": ("methods", "reproducing", "performance"),
    "Project": ("security", "architecture", "moved", "contributing", "changelog", "security-policy"),
}
# Modules that other people program against.
PYTHON_REFERENCE = (
    "shared.contract.plan",
    "shared.contract.presets",
    "shared.contract.messages",
    "shared.contract.measurements",
    "shared.contract.errors",
    "shared.contract.versions",
    "shared.tensors.names",
    "shared.tensors.spec",
    "shared.tensors.wire",
    "shared.tensors.mean",
    "shared.learning.methods.base",
)
_LINK = re.compile(r"(!?\[[^\]]*\])\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
_MARK = re.compile(r"^<!-- generated: ([a-z-]+) -->$", re.MULTILINE)


def build_site(root: Path, output: Path) -> int:
    """Build the site strictly: any warning is an error. Return Sphinx's exit code."""
    shutil.rmtree(output, ignore_errors=True)
    with TemporaryDirectory() as folder:
        source, doctrees = Path(folder) / "source", Path(folder) / "doctrees"
        write_source(root, source)
        command = ["sphinx", "--fail-on-warning", "--keep-going", "--quiet", "--builder=html"]
        command += [f"--conf-dir={root / 'docs'}", f"--doctree-dir={doctrees}", str(source), str(output)]
        return subprocess.run([sys.executable, "-m", *command], cwd=root, check=False).returncode  # noqa: S603 - fixed arguments


def write_source(root: Path, target: Path) -> None:
    """Write the Markdown that Sphinx reads: pages with links that work on the site, and generated parts filled in."""
    docs = root / "docs"
    shutil.copytree(docs, target, ignore=shutil.ignore_patterns("_*", "*.py"))
    pages = {name: root / name for name in ROOT_PAGES} | {f"docs/{page.name}": page for page in docs.glob("*.md")}
    for name, page in pages.items():
        on_site = target / ROOT_PAGES.get(name, page.name)
        on_site.write_text(_fill_in(site_links(page.read_text(), page.parent, root), root))
    index = target / "index.md"
    index.write_text(index.read_text() + _navigation())


def site_links(text: str, folder: Path, root: Path) -> str:
    """Point links at the site's pages. A link to any other file of the repository becomes its text.

    A link whose text is a file name gets the title of the page as its text.
    """

    def rewrite(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        name = (folder / target).resolve().relative_to(root.resolve()).as_posix()
        if label == f"[{Path(target).name}]" and target.endswith(".md"):
            label = "[]"
        if name in ROOT_PAGES:
            return f"{label}({ROOT_PAGES[name]}{anchor})"
        if name.startswith("docs/") and (root / name).is_file():
            return f"{label}({name.removeprefix('docs/')}{anchor})"
        return label[1:-1]

    return _LINK.sub(rewrite, text)


def _fill_in(text: str, root: Path) -> str:
    parts: dict[str, Callable[[], str]] = {
        "error-codes": lambda: render_error_codes(root),
        "coordinator-api": lambda: render_api(coordinator_document()),
        "agent-api": lambda: render_api(agent_document()),
        "python-reference": _python_reference,
    }
    return _MARK.sub(lambda match: parts[match[1]](), text)


def _python_reference() -> str:
    return "\n".join(
        f"## `{module}`\n\n```{{eval-rst}}\n.. automodule:: {module}\n```\n" for module in PYTHON_REFERENCE
    )


def _navigation() -> str:
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
        for caption, pages in NAVIGATION.items()
    )
