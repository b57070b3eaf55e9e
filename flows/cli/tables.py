"""Tables in the terminal."""

from rich import box
from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 132  # a pipe has no width, and rich would assume 80


def with_width(console: Console) -> Console:
    """Return the console, or one that is wide enough for a table if it is a pipe."""
    return console if console.is_terminal else Console(file=console.file, width=max(console.width, PIPE_WIDTH))


def plain_table(*names: str, left: int, title: str | None = None) -> Table:
    """Return an empty table whose first `left` columns hold text and the others numbers."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left"
    )
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < left else "right", overflow="fold")
    return table
