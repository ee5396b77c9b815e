"""A dump as plain text, for pipes and for whoever has no terminal."""

from __future__ import annotations

from collections.abc import Iterator

from torchrl_agentic.printable import printable
from torchrl_agentic.viewer.library import Library
from torchrl_agentic.viewer.listing import blocks_of
from torchrl_agentic.viewer.query import Query
from torchrl_agentic.viewer.rows import Gone, Row


def read_all(library: Library, query: Query, sort: str) -> list[Row]:
    """Read a dump to its end, as it is now, and list what is asked for."""
    while library.work():
        pass
    library.ask(query, sort, None)
    while library.work():
        pass
    return list(library.listing.shown)


def text_of(library: Library, row: Row) -> Iterator[str]:
    """Write a trajectory, line by line; nothing is folded or left out."""
    try:
        blocks = blocks_of(row, library.mask, whole=True)
    except Gone as error:
        yield f"(cannot be read: {printable(str(error))})"
        return
    for block in blocks:
        if block.title:
            yield printable("".join(text for text, _ in block.title)).rstrip("─ ")
        for line in block.text.removesuffix("\n").split("\n") if block.text else ():
            yield f"  {printable(line)}"
    yield ""
