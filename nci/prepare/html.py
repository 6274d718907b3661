"""A Wikipedia page with its tags -> title, abstract and text, cut as the published NQ320k cuts it.

In: Natural Questions' own text, in which words and tags stand apart (`<P> The first paragraph . </P>`), or HTML, which
becomes such text first. Out: a WikiPage. Knows nothing of files or questions.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import NamedTuple

TAG = re.compile(r"(?<!\S)</?[A-Za-z][^\s<>]*>(?!\S)")
PARAGRAPH = re.compile(r"(?<!\S)<P>(?!\S)(.*?)(?:(?<!\S)</P>(?!\S)|\Z)", re.DOTALL)
HEADING = re.compile(r"(?<!\S)<H1>(?!\S)(.*?)(?<!\S)</H1>(?!\S)", re.DOTALL)
LIST_END = "</Ul>"

# Natural Questions keeps these tags; of the others, those inside a line do nothing and the rest parts words.
_KEPT = re.compile("h[1-6]|p|ul|ol|li|dl|dt|dd|table|tr|td|th")
_INSIDE_A_LINE = re.compile(
    "a|abbr|b|bdi|bdo|big|cite|code|em|font|i|kbd|mark|q|s|small|span|strong|sub|sup|tt|u|var|wbr"
)
# What the tokens of Natural Questions leave out, too: footnote marks, edit links, the menus around a page.
_UNSEEN = re.compile("script|style|title")
_UNSEEN_MARKS = re.compile(r"(?<!\S)(reference|mw-editsection|mw-navigation)(?!\S)")


class WikiPage(NamedTuple):
    """`text` holds the abstract and all that follows; both are free of tags."""

    title: str
    abstract: str
    text: str


def read_page(tagged: str) -> WikiPage:
    """Cut a page: the title is its first heading, the abstract its first paragraph that has words.

    The text runs from the first paragraph to the last list but one: what follows there are the links of the footer. A
    page without paragraphs is taken from its heading on.
    """
    heading = HEADING.search(tagged)
    first = PARAGRAPH.search(tagged)
    start = first.start() if first else heading.end() if heading else 0
    end = tagged.rfind(LIST_END)
    before = tagged.rfind(LIST_END, 0, end) if end > 0 else -1
    end = before if before >= 0 else end
    paragraphs = (without_tags(match[1]) for match in PARAGRAPH.finditer(tagged))
    return WikiPage(
        title=read_title(tagged),
        abstract=next((words for words in paragraphs if words), ""),
        text=without_tags(tagged[start : end if end > start else len(tagged)]),
    )


def read_title(tagged: str) -> str:
    """The first heading; empty where there is none."""
    heading = HEADING.search(tagged)
    return without_tags(heading[1]) if heading else ""


def without_tags(tagged: str) -> str:
    """The words alone, one space between them; `a < b` is no tag."""
    return " ".join(TAG.sub(" ", tagged).split())


def tagged_text(html: str) -> str:
    """HTML in the form of Natural Questions' own text: tags of blocks stand apart, the others are gone."""
    parser = _Tags()
    parser.feed(html)
    parser.close()
    return "".join(parser.pieces)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._unseen = ""  # name of the element that is passed over
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        marks = " ".join(value or "" for name, value in attrs if name in ("class", "id"))
        if self._unseen:
            self._depth += tag == self._unseen
        elif _UNSEEN.fullmatch(tag) or _UNSEEN_MARKS.search(marks):
            self._unseen, self._depth = tag, 1
        else:
            self._part(tag, f" <{tag.capitalize()}> ")

    def handle_endtag(self, tag: str) -> None:
        if not self._unseen:
            self._part(tag, f" </{tag.capitalize()}> ")
        elif tag == self._unseen:
            self._depth -= 1
            self._unseen = tag if self._depth else ""

    def _part(self, tag: str, kept: str) -> None:
        if not _INSIDE_A_LINE.fullmatch(tag):
            self.pieces.append(kept if _KEPT.fullmatch(tag) else " ")

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            self.pieces.append(data)
