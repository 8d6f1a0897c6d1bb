"""What a browser would make of a page, as far as tests ask: `from pages import Parsed`."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "input", "br", "link", "img", "hr"}


class Parsed(HTMLParser):
    """A page's text and tags; fails where tags are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check_stands_alone(page: str) -> Parsed:
    """Nothing runs, and nothing is fetched."""
    parsed = Parsed(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert not [name for name, _ in parsed.attributes if name in ("src", "href", "style") or name.startswith("on")]
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in page
    return parsed
