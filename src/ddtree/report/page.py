"""The report as one HTML file: the Markdown's content, with the plots inside it and nothing loaded from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from ddtree.report.drawing import Drawing

_STYLE = """
:root { --ink: #22303c; --faint: #5a6a78; --line: #dde3e8; --mark: #0b6e99; --back: #ffffff; --box: #f5f8fa; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 64rem; margin: 0 auto; padding: 2.5rem 1.5rem 5rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .75rem; letter-spacing: -.01em; }
h2 { font-size: 1.35rem; margin: 3rem 0 .75rem; padding-bottom: .35rem; border-bottom: 2px solid var(--line); }
h3 { font-size: 1.05rem; margin: 2rem 0 .6rem; }
h1 + p { color: var(--faint); margin-top: 0; }
#recommendation + p { background: #e8f3f8; border-left: 4px solid var(--mark); padding: .9rem 1.1rem;
  border-radius: 4px; }
.wide { overflow-x: auto; margin: .75rem 0 1.25rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--faint); border-bottom: 1.5px solid #9aa7b2;
  vertical-align: bottom; }
th, td { padding: .38rem .8rem .38rem 0; }
td { border-bottom: 1px solid var(--line); vertical-align: top; }
td[style*="right"] { white-space: nowrap; }
tr:last-child td { border-bottom: none; }
thead:has(th:empty) { display: none; }
figure { margin: 1rem 0 2rem; }
figure svg { max-width: 100%; height: auto; display: block; }
figcaption { color: var(--faint); font-size: .88rem; margin-top: .4rem; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: .9rem 1rem; overflow-x: auto;
  font-size: .82rem; line-height: 1.45; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
nav { font-size: .9rem; margin: 1rem 0 0; }
nav a { color: var(--mark); text-decoration: none; margin-right: 1.1rem; white-space: nowrap; }
@media print { nav { display: none; } h2, h3 { break-after: avoid; } figure, table { break-inside: avoid; } }
"""


def page(title: str, markdown: str, drawings: Sequence[Drawing]) -> str:
    """HTML of ``markdown``. Text in it, the server's words too, is escaped: raw HTML is not let through."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    for drawing in drawings:
        image = re.compile(rf'<p><img src="figures/{re.escape(drawing.name)}\.svg"[^>]*></p>\s*<p>(.*?)</p>', re.DOTALL)
        found = image.search(body)
        if found:
            svg = _own_ids(drawing)
            figure = (
                f'<figure role="img" aria-label="{escape(drawing.title)}">{svg}'
                f"<figcaption>{found.group(1)}</figcaption></figure>"
            )
            body = body[: found.start()] + figure + body[found.end() :]
    body = re.sub(r"<img [^>]*>", "", body)  # any that is left is in words of others, and would be loaded
    headings: list[tuple[str, str]] = []

    def with_id(match: re.Match[str]) -> str:
        slug = re.sub(r"[^a-z0-9]+", "-", match.group(1).lower()).strip("-")
        headings.append((slug, match.group(1)))
        return f'<h2 id="{slug}">{match.group(1)}</h2>'

    body = re.sub(r"<h2>(.*?)</h2>", with_id, body)
    links = " ".join(f'<a href="#{slug}">{text}</a>' for slug, text in headings)
    body = body.replace("<h2", f"<nav>{links}</nav>\n<h2", 1)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _own_ids(drawing: Drawing) -> str:
    """Every drawing's ids made its own: they share one page."""
    ids = set(re.findall(r'\bid="([^"]+)"', drawing.svg))
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{drawing.name}-\1"', drawing.svg)
    svg = re.sub(
        r'href="#([^"]+)"', lambda m: f'href="#{drawing.name}-{m.group(1)}"' if m.group(1) in ids else m.group(0), svg
    )
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{drawing.name}-\1)", svg)
