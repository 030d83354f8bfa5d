"""Pages of the site that are made when it is built: commands, decisions, notebooks, and others.

A hook of MkDocs (see mkdocs.yml); `make docs` runs the notebooks before.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from click import Command

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "build" / "notebooks"
ABOVE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    for name in ABOVE:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_inside(text)))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    files.append(File.generated(config, "adr/index.md", content=decisions_page()))
    for path, content in gallery():
        files.append(File.generated(config, f"gallery/{path}", content=content))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Let links to files above docs/ lead to their pages here."""
    for name in ABOVE:
        markdown = markdown.replace(f"](../{name}", f"]({name}")
    return markdown


def _inside(text: str) -> str:
    """Let links of a file above docs/ lead to pages; what is no page is named only."""
    text = text.replace("](docs/", "](")
    return re.sub(r"\[([^]]+)\]\((?!https?:|#|mailto:)([^)]*)\)", _page_or_name, text)


def _page_or_name(link: re.Match[str]) -> str:
    target = link[2].partition("#")[0]
    is_page = target in ABOVE or (
        (ROOT / "docs" / target).is_file() and target.endswith((".md", ".png"))
    )
    return link[0] if is_page else link[1]


def decisions_page() -> str:
    """Return a list of all decisions."""
    lines = ["# Decisions", "", "Why things are as they are, in the order in which it was decided."]
    for path in sorted((ROOT / "docs" / "adr").glob("0*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        lines += ["", f"* [{title}]({path.name})"]
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """Return every command with its arguments and options, as the program itself has them."""
    from typer.main import get_group

    from schedlab.experiments.commands.app import app

    lines = ["# Commands", "", "Made from the program: what `schedlab COMMAND --help` says."]
    group = get_group(app)
    for name in group.commands:
        command = group.commands[name]
        inner = getattr(command, "commands", None)
        if inner:
            lines += ["", f"## schedlab {name}", "", _told(command.help)]
        for path, one in (
            [(f"{name} {sub}", inner[sub]) for sub in inner] if inner else [(name, command)]
        ):
            lines += ["", f"{'###' if inner else '##'} schedlab {path}", "", _told(one.help), ""]
            lines += list(_parameters(one))
    return "\n".join(lines) + "\n"


def _parameters(command: Command) -> Iterator[str]:
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "argument":
            names = f"`{parameter.metavar or parameter.name.upper()}`"
        default = "" if parameter.default in (None, False, ()) else f"`{parameter.default}`"
        metavar = getattr(parameter, "metavar", None) or ""
        rows.append(
            [names, f"`{metavar}`" if metavar and names[1] == "-" else "", default,
             _told(getattr(parameter, "help", ""))]
        )  # fmt: skip
    if rows:
        yield "| argument or option | takes | default | |"
        yield "|---|---|---|---|"
        yield from (
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
        )


def _told(text: str | None) -> str:
    return html.escape(" ".join((text or "").split()), quote=False)


def _cell(figure: Path) -> list[int]:
    """Return which cell of its notebook a figure is of: NAME_10_0.png comes after NAME_9_0.png."""
    return [int(part) for part in figure.stem.rsplit("_", 2)[1:]]


def gallery() -> Iterator[tuple[str, str | bytes]]:
    """Yield the notebooks that were run, and a page that lists them with a figure of each."""
    lines = [
        "# Gallery",
        "",
        "The notebooks as they ran when this site was built (`FAST=1`: few requests, so figures "
        "are rougher than those in the results).",
    ]
    for source in sorted((ROOT / "notebooks").glob("*.py")):
        page = NOTEBOOKS / f"{source.stem}.md"
        if not page.is_file():
            lines += ["", f"* {source.stem}: not run for this build"]
            continue
        text = page.read_text(encoding="utf-8")
        title = next((line[2:] for line in text.splitlines() if line.startswith("# ")), source.stem)
        lines += ["", f"## [{title}]({source.stem}.md)"]
        figures = sorted((NOTEBOOKS / f"{source.stem}_files").glob("*.png"), key=_cell)
        if figures:
            lines += ["", f"[![{title}]({source.stem}_files/{figures[0].name})]({source.stem}.md)"]
        yield f"{source.stem}.md", text
        for figure in figures:
            yield f"{source.stem}_files/{figure.name}", figure.read_bytes()
    yield "index.md", "\n".join(lines) + "\n"
