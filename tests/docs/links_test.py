"""Every link of the pages within the tree leads to a file and to a heading in it, and docs/README.md lists every page of docs/.

Links to other sites (http, https) are not tried: a test uses no network, so that such a link can be dead.
"""
import collections
import html
import re
import unittest

import pages

LINK = re.compile(r"(?<!\\)!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")
HTML_LINK = re.compile(r"<(?:a|img|source)\s[^>]*(?:href|src|srcset)=\"([^\"]+)\"")
ID = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6} +(.*?)(?: +#+)?$", re.M)
FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.(?:bzl|cc|h|md|py|sh|svg|toml|txt)")


def anchors_of(text):
    """Returns what may follow a '#': the headings, in GitHub's spelling, and the ids that a page sets itself."""
    found, seen = set(ID.findall(text)), collections.Counter()
    for heading in HEADING.findall(pages.prose_of(text)):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", html.unescape(heading)).replace("`", "")
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def wrong_link(page, target):
    """Returns what is wrong with a link, or nothing."""
    if re.match(r"https?://", target):
        return None  # a test needs no network
    path, _, anchor = target.partition("#")
    file = (pages.ROOT / page).parent / path if path else pages.ROOT / page
    if not file.exists():
        return f"there is no {path}"
    if pages.ROOT not in file.resolve().parents:
        return f"{path} is outside the tree"
    if anchor and anchor not in anchors_of(file.read_text(encoding="utf-8")):
        return f"{path or 'this page'} has no heading #{anchor}"
    return None


def wrong_links(page, text):
    prose = re.sub(r"`[^`\n]*`", "", pages.prose_of(text))
    return [f"{page}: {target}: {complaint}" for target in LINK.findall(prose) + HTML_LINK.findall(prose)
            if (complaint := wrong_link(page, target))]


def missing_files(page, text):
    """Names files in inline code which look like files of the tree, and are not there."""
    for code in pages.INLINE_CODE.findall(pages.prose_of(text)):
        for path in FILE.findall(code):
            path = path.removeprefix("fulgur/")  # as it stands in #include
            folder = path.split("/")[0]
            if folder != "runs" and (pages.ROOT / folder).is_dir() and not (pages.ROOT / path).exists():  # runs/: a reader's own
                yield f"{page}: there is no {path}"


class LinksTest(unittest.TestCase):
    def test_links_lead_to_files_and_headings(self):
        self.assertEqual([complaint for page in pages.pages() for complaint in wrong_links(page, pages.read(page))], [])

    def test_files_that_the_text_names_are_there(self):
        self.assertEqual([complaint for page in pages.pages() for complaint in missing_files(page, pages.read(page))], [])

    def test_the_index_has_every_page_of_docs(self):
        index = pages.ROOT / "docs/README.md"
        listed = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(index.read_text())}
        missing = [page for page in pages.pages() if page.startswith("docs/") and (pages.ROOT / page) not in listed | {index}]
        self.assertEqual(missing, [])

    def test_wrong_links_are_found(self):
        text = "# One `heading`\n[a](missing.md) [b](README.md#nowhere) [c](#one-heading) [d](https://x.org/) ![e](no.svg)\n"
        self.assertEqual(wrong_links("docs/page.md", text.replace("[c](#one-heading) ", "")), [
            "docs/page.md: missing.md: there is no missing.md",
            "docs/page.md: README.md#nowhere: README.md has no heading #nowhere",
            "docs/page.md: no.svg: there is no no.svg",
        ])
        self.assertEqual(anchors_of(text + "# One heading\n## A/B: c_d, e-f"), {"one-heading", "one-heading-1", "ab-c_d-e-f"})
        self.assertEqual(list(missing_files("docs/page.md", "`core/no.h` `core/module.h`, `fulgur/core/batch.h`")),
                         ["docs/page.md: there is no core/no.h"])


if __name__ == "__main__":
    unittest.main()
