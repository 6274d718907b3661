"""Pages with tags: what becomes title, abstract and text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nci.prepare.html import read_page, read_title, tagged_text, without_tags
from nci.prepare.titles import title_key

WORDS = st.lists(st.sampled_from(["wind", "5", "<", "a>b", "é", "''", "<3"]), max_size=3).map(" ".join)
BLOCK = st.tuples(st.sampled_from(["P", "Ul", "Td", 'Td_colspan="2"', "H2", ""]), WORDS)


def test_a_page_is_cut_as_the_published_data_is() -> None:
    page = read_page(
        "Wind - wikipedia <H1> Trade <I> wind </H1> Jump to : <Table> <Tr> box </Tr> </Table> <P> </P> <P> It blows . </P> "
        "<H2> Use </H2> <Ul> <Li> ships </Li> </Ul> end <Ul> <Li> languages </Li> </Ul> footer <Ul> about </Ul>"
    )
    assert page.title == "Trade wind"
    assert page.abstract == "It blows ."
    assert page.text == "It blows . Use ships end languages"


@pytest.mark.parametrize(
    ("tagged", "text"),
    [
        ("<H1> T </H1> no paragraph", "no paragraph"),
        ("no tag at all", "no tag at all"),
        ("<H1> T </H1> <P> one list </P> <Ul> x </Ul> gone", "one list x"),
        ("<Ul> a </Ul> <Ul> b </Ul> <P> after all lists </P>", "after all lists"),
        ("<P> never closed", "never closed"),
        ("", ""),
    ],
)
def test_odd_pages(tagged: str, text: str) -> None:
    assert read_page(tagged).text == text


def naive(tagged: str) -> tuple[str, str]:
    """Abstract and text by walking over the words."""
    words = tagged.split()
    is_tag = [word[0] == "<" and word[-1] == ">" and len(word) > 2 and word.strip("</")[0].isalpha() for word in words]
    start = words.index("<P>") if "<P>" in words else 0
    lists = [place for place, word in enumerate(words) if word == "</Ul>"]
    end = lists[-2] if len(lists) > 1 else lists[0] if lists else len(words)
    if end <= start:
        end = len(words)
    text = [word for word, tag in list(zip(words, is_tag, strict=True))[start:end] if not tag]
    abstract: list[str] = []
    inside = False
    for word, tag in zip(words, is_tag, strict=True):
        if word == "<P>":
            inside = True
        elif word == "</P>":
            inside = False
            if abstract:
                break
        elif inside and not tag:
            abstract.append(word)
    return " ".join(abstract), " ".join(text)


@given(st.lists(BLOCK, max_size=8))
def test_any_page_is_cut_as_a_walk_over_its_words(blocks: list[tuple[str, str]]) -> None:
    pieces = [f"<{tag}> {words} </{tag.split('_')[0]}>" if tag else words for tag, words in blocks]
    tagged = " ".join(pieces)
    page = read_page(tagged)
    assert (page.abstract, page.text) == naive(tagged)


def test_only_tags_go() -> None:
    assert without_tags('if a < b and c > d <Td_colspan="2"> 1<2 </Td>') == "if a < b and c > d 1<2"
    assert read_title("<P> none </P>") == ""


def test_html_becomes_the_same_page() -> None:
    html = (
        "<!DOCTYPE html><HTML><HEAD><TITLE>Wind - Wikipedia</TITLE><STYLE>p {x}</STYLE><script>if (a<b) {}</script></HEAD>"
        '<BODY><H1 id="f">Trade <I>wind</I></H1><DIV>Jump</DIV><P class="x">In <A href="#">bio</A>logy &amp; art<BR/>it '
        'blows.<SUP class="x reference">[<SUP>1</SUP>]</SUP></P>'
        "<DIV id='mw-navigation'><DIV>menu</DIV><P>menu</P></DIV>"
        "<TABLE><TR><TD>one</TD><TD>two</TD></TR></TABLE><UL><LI>a</LI></UL><UL><LI>b</LI></UL></BODY></HTML>"
    )
    page = read_page(tagged_text(html))
    assert page == ("Trade wind", "In biology & art it blows.", "In biology & art it blows. one two a")


def test_titles_that_name_the_same_page() -> None:
    assert title_key("The Mother (How I Met Your Mother)") == title_key("the mother ( How I Met your Mother )")
    assert title_key("Beyoncé") == title_key("beyonce")
    assert title_key("Season 8") != title_key("Season 9")
    assert title_key("") == title_key("  ") == ""
