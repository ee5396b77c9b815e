"""Write the README's table of formats from the registry: `python scripts/formats_table.py`."""

from pathlib import Path

from torchrl_agentic.parsers.registry import formats_table

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "| parser | also known as |", "| `vllm:name`, `sglang:name` |"


def with_table(readme: str) -> str:
    """Return the README with the table of formats as it should be."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{formats_table()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text("utf-8")), "utf-8")
