"""Every relative link and anchor in the repository's Markdown leads somewhere: `python -m tests.docs_links`.

Links to other sites are not followed: a check that needs a network fails for reasons that are not ours.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote

ROOT: Final = Path(__file__).parent.parent

_FENCE: Final = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE: Final = re.compile(r"`[^`\n]*`")
_LINK: Final = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_DEFINITION: Final = re.compile(r"^\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
_HTML: Final = re.compile(r"(?:src|href)=\"([^\"]+)\"")
_HEADING: Final = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
_HTML_ANCHOR: Final = re.compile(r"(?:id|name)=\"([^\"]+)\"")
_ELSEWHERE: Final = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def markdown_files(root: Path = ROOT) -> list[Path]:
    """The Markdown files that are, or would be, under version control; all of them where there is none."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    try:
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        found = (path for path in root.rglob("*.md") if not any(p[0] == "." for p in path.relative_to(root).parts))
        return sorted(found)
    return sorted(path for name in listed.split("\0") if name and (path := root / name).exists())


def links(text: str) -> Iterator[str]:
    """Targets of the links in a Markdown text, code left out."""
    prose = _CODE.sub("", _FENCE.sub("", text))
    for pattern in (_LINK, _DEFINITION, _HTML):
        yield from pattern.findall(prose)


def anchors(text: str) -> set[str]:
    """Anchors that GitHub and most renderers give to the headings of a text, and those written as HTML."""
    found: set[str] = set()
    prose = _FENCE.sub("", text)
    for heading in _HEADING.findall(prose):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        number, unique = 0, slug
        while unique in found:
            number += 1
            unique = f"{slug}-{number}"
        found.add(unique)
    return found | set(_HTML_ANCHOR.findall(prose))


def broken_links(file: Path, root: Path = ROOT) -> list[str]:
    """One sentence for each link of that file that leads nowhere."""
    text = file.read_text(encoding="utf-8")
    problems = []
    for target in links(text):
        if _ELSEWHERE.match(target):
            continue
        path, _, anchor = unquote(target).partition("#")
        there = (root / path.lstrip("/") if path.startswith("/") else file.parent / path) if path else file
        where = f"{file.relative_to(root)}: {target}"
        if not there.resolve().is_relative_to(root.resolve()):
            problems.append(f"{where} leads out of the repository")
        elif not there.exists():
            problems.append(f"{where} does not exist")
        elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text(encoding="utf-8")):
            problems.append(f"{where} has no such heading")
    return problems


def main() -> int:
    """Print what is broken; the exit status says whether anything was."""
    files = markdown_files()
    problems = [problem for file in files for problem in broken_links(file)]
    for problem in problems:
        print(problem)
    print(f"{len(files)} Markdown files, {len(problems)} broken links")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
