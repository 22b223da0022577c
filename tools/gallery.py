"""Run the examples, and put what they print and draw into their pages: `python tools/gallery.py [NAME ...]`.

In `docs/examples/NAME.md`, a block of `bash` with one of `text` behind it is a command and what it prints.
The command is run and the `text` written anew; the first one of a page draws `docs/figures/examples/NAME.svg`
as well. Then the sentence on each first table that says where the default stands is written from the table,
and the cards of `docs/examples.md` from titles and first lines; with `--list` they alone.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES, INDEX = ROOT / "docs" / "examples", ROOT / "docs" / "examples.md"
PAIR = re.compile(r"(^```bash\n(?:.*\n)*?(?P<command>.+)\n```\n\n)```text\n(?:.*\n)*?```$", flags=re.M)
LAUNCHERS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}


def printed(command: str, *more: str) -> str:
    """The standard output of a command; the rest goes to the terminal."""
    launcher, *words = shlex.split(command)
    print(f"{command} {' '.join(more)}", file=sys.stderr, flush=True)
    call = [*LAUNCHERS[launcher], *words, *more]
    return subprocess.run(call, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout


def refresh(page: Path) -> None:
    """Run the commands of a page, and write what they print into it."""
    figure = ["--figure", f"docs/figures/examples/{page.stem}.svg"]

    def run(match: re.Match[str]) -> str:
        output = printed(match["command"], *figure).strip()
        figure.clear()
        return f"{match[1]}```text\n{output}\n```"

    page.write_text(PAIR.sub(run, page.read_text("utf-8")), "utf-8")


def standing(page: str) -> str:
    """A page with the sentence on its first table, whose first column is better if it is lower."""
    table = re.findall(r"^\| (\S.*?) +\| +([^|]+?) \|", page[: page.find("<!-- standing -->")], flags=re.M)
    (_, column), *rows = table[[name for name, _ in table].index("estimator") :]
    values = {name: float(cell.split()[0]) for name, cell in rows if not set(name) <= set("- ")}
    (default, own), *others = values.items()
    best, least = min(others, key=lambda row: row[1])
    place = "above the lowest row" if own > least else "below the next row"
    sentence = (
        f"By *{column}*, lower is better, `{default}`, the default, ends {abs(own / least - 1):.1%} {place}, "
        f"`{best}`."
    )
    block = f"<!-- standing -->\n{sentence}\n<!-- /standing -->"
    return re.sub(r"<!-- standing -->.*<!-- /standing -->", lambda _: block, page, flags=re.S)


def listing(index: str) -> str:
    """The text of `docs/examples.md` with a card for each page of its table of contents."""
    cards = []
    for name in re.findall(r"^examples/(\w+)$", index, flags=re.M):
        text = (PAGES / f"{name}.md").read_text("utf-8")
        title, line = re.findall(r"\A# (.+)\n\n(.+)\n", text)[0]
        picture = re.findall(r"!\[.*?\]\(\.\./(figures/\S+)\)", text)[0]
        link = f"examples/{name}.md"
        cards.append(f"- [![{title}]({picture})]({link})\n\n  **[{title}]({link})**\n\n  {line}\n")
    block = '<!-- gallery -->\n<div class="gallery">\n\n{}\n</div>\n<!-- /gallery -->'
    whole = block.format("\n".join(cards))
    return re.sub(r"<!-- gallery -->.*<!-- /gallery -->", lambda _: whole, index, flags=re.S)


def main(names: list[str]) -> None:
    if names != ["--list"]:
        for page in [PAGES / f"{name}.md" for name in names] or sorted(PAGES.glob("*.md")):
            refresh(page)
    for page in PAGES.glob("*.md"):
        if "<!-- standing -->" in (text := page.read_text("utf-8")):
            page.write_text(standing(text), "utf-8")
    INDEX.write_text(listing(INDEX.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
