"""Write the table of formats into `docs/howto/formats.md`: `python scripts/formats_table.py`."""

from pathlib import Path

from torchrl_agentic.parsers.registry import formats_table

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "formats.md"
BEGIN, END = "| parser | also known as |", "| `vllm:name`, `sglang:name` |"


def with_table(page: str) -> str:
    """Return the page with its table of formats replaced by that of the registry.

    Args:
        page: Text of `docs/howto/formats.md`.

    Returns:
        The same text; the rows of adapters and `auto` at the end of the table are kept.
    """
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{formats_table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
