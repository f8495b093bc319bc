"""The report as Markdown that GitHub renders: the same words and tables, pictures by link."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.bench.report.page import Block, Page
    from tailrace.bench.report.tables import Table

_SPECIAL = re.compile(r"([\\`*_\[\]|~#])")


def to_markdown(page: Page, links: dict[str, str]) -> str:
    """Return the page as Markdown.

    Args:
        page: What the report says.
        links: Where each picture's file is, by the picture's id; empty leaves them out.
    """
    parts = [f"# {escaped(page.title)}", escaped(page.subtitle)]
    parts += [_statement(text, reasons) for _, text, reasons in page.statements]
    if page.cautions:
        parts.append(_bullets(page.cautions))
    for section in page.sections:
        parts.append(f"## {escaped(section.title)}")
        for block in section.blocks:
            parts += _folded(block, links) if block.is_folded else _block(block, links)
    return "\n\n".join(part for part in parts if part) + "\n"


def escaped(text: str) -> str:
    """Return text that neither Markdown nor HTML reads anything into."""
    flat = " ".join(text.split())
    return _SPECIAL.sub(r"\\\1", html.escape(flat, quote=False))


def _statement(text: str, reasons: Sequence[str]) -> str:
    lines = f"**{escaped(text)}**"
    return f"{lines}\n\n{_bullets(reasons)}" if reasons else lines


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {escaped(line)}" for line in lines)


def _folded(block: Block, links: dict[str, str]) -> list[str]:
    """GitHub shows what stands in `<details>` on demand; the blank lines make it Markdown."""
    summary = html.escape(" ".join(block.heading.split()))
    inside = _block(replace(block, heading=""), links)
    return [f"<details>\n<summary>{summary}</summary>", *inside, "</details>"]


def _block(block: Block, links: dict[str, str]) -> list[str]:
    found = []
    if block.heading:
        found.append(f"### {escaped(block.heading)}")
    if block.picture is not None and block.picture_id in links:
        found.append(f"![{escaped(block.alt)}]({links[block.picture_id]})")
    if block.note and (block.picture is None or block.picture_id in links):
        found.append(escaped(block.note))
    if block.table is not None:
        found.append(table(block.table))
        if block.table.note:
            found.append(escaped(block.table.note))
    if block.facts:
        found.append("\n".join(f"- {escaped(k)}: {escaped(v)}" for k, v in block.facts))
    if block.lines:
        found.append(_bullets(block.lines))
    if block.code:
        found.append(_fenced(block.code))
    return found


def table(content: Table) -> str:
    """Return a table in GitHub's form, its title above."""
    rule = [":--" if at in content.words else "--:" for at in range(len(content.headings))]
    lines = [_row(tuple(map(escaped, content.headings))), _row(tuple(rule))]
    for covers, row in content.grouped:
        cells = [escaped(cell) for cell in row]
        if not covers:
            cells[0] = ""
        if content.hot is not None:
            cells[content.hot] = f"**{cells[content.hot]}**" if cells[content.hot] else ""
        lines.append(_row(tuple(cells)))
    return f"**{escaped(content.title)}**\n\n" + "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _fenced(code: str) -> str:
    """Return a code block whose fence is longer than any within it."""
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(longest + 1, 3)
    return f"{fence}text\n{code.rstrip()}\n{fence}"
