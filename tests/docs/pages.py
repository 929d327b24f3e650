"""The pages of the documentation, and how their blocks are run."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "ROOT",
    "Block",
    "Names",
    "all_blocks",
    "block_with",
    "blocks",
    "last_commit",
    "page",
    "run",
]

ROOT = Path(__file__).parents[2]

Names = dict[str, Any]


class Block(NamedTuple):
    """A fenced block of a page; `caption` is the file that it is to be saved as."""

    language: str
    caption: str
    text: str


_FENCED = re.compile(
    r"^```(?:\{code-block\} )?(\w+)\n(?::caption: (\S+)\n\n)?(.*?)\n```$", re.MULTILINE | re.DOTALL
)


def page(name: str) -> str:
    """Return the text of a page, such as "tutorial/bot"; or of README."""
    return (ROOT / ("README.md" if name == "README" else f"docs/{name}.md")).read_text()


def last_commit(directory: Path) -> Path:
    """Write the files of the last commit into a directory, as a new clone has them."""
    archive = directory.with_suffix(".tar")
    subprocess.run(["git", "archive", f"--output={archive}", "HEAD"], cwd=ROOT, check=True)
    with tarfile.open(archive) as files:
        files.extractall(directory, filter="data")
    return directory


def all_blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page, whatever their language."""
    for language, caption, block in _FENCED.findall(text):
        yield Block(language, caption, block)


def blocks(text: str, language: str = "python") -> list[str]:
    """Return the blocks of a page in one language."""
    return [block.text for block in all_blocks(text) if block.language == language]


def block_with(text: str, words: str) -> str:
    """Return the program of a page that contains these words."""
    (found,) = [block for block in blocks(text) if words in block]
    return found


async def run(block: str, names: Names, *replaced: tuple[str, object]) -> None:
    """Run a program of a page, which may await, with its addresses replaced."""
    for old, new in replaced:
        assert old in block
        block = block.replace(old, str(new))
    code = compile(block, "a page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.isawaitable(result):
        await result
