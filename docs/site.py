"""Hooks of mkdocs: files of the project that are pages of the site as well, and links to what is not on the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: Pages by the file that they are.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "examples/README.md": "project/examples.md",
    "benchmarks/prompts/README.md": "project/prompts.md",
    "heads/smollm2-135m/README.md": "heads.md",
    "src/paceline/checkpoints/smollm2-135m/PROVENANCE.md": "project/provenance.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the project's own files, unless a page of docs/ stands for them."""
    for source, page in PAGES.items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links by where things are in the repository become links on the site, or words where it has no such page."""
    path = page.file.src_uri
    source = next((file for file, shown in PAGES.items() if shown == path and path != "heads.md"), f"docs/{path}")

    def moved(link: re.Match[str]) -> str:
        image, text, address = link.groups()
        name, hash_, anchor = address.partition("#")
        if not name or ":" in name:
            return link[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
        shown = PAGES.get(there, there.removeprefix("docs/"))
        if shown == there and not there.startswith("docs/") and not (ROOT / there).exists():
            return link[0]  # dead: mkdocs says so
        if not (shown in PAGES.values() or there.startswith("docs/")):
            return text  # a file of the repository
        return f"{image}[{text}]({posixpath.relpath(shown, posixpath.dirname(path) or '.')}{hash_}{anchor})"

    return LINK.sub(moved, markdown)
