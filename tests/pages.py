"""What a page of HTML holds, by the standard library's parser."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """A page with tinted texts in `<pre class="litspec-text">`.

    Attributes:
        texts: For each such text its pieces, and the tint of each.
        rest: All other text.
        tags: Of all elements, in order.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[list[tuple[str, str]]] = []
        self.rest = ""
        self.tags: list[str] = []
        self._in_text = False
        self._tint = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "pre" and dict(attrs).get("class") == "litspec-text":
            self._in_text = True
            self.texts.append([])
        found = re.search(r"background-color:\s*(#\w+)", dict(attrs).get("style") or "")
        self._tint = found[1] if found else ""

    def handle_endtag(self, tag: str) -> None:
        self._in_text = self._in_text and tag != "pre"

    def handle_data(self, data: str) -> None:
        if self._in_text:
            self.texts[-1].append((data, self._tint))
        else:
            self.rest += data + " "
