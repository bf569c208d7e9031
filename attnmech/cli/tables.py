"""How are a result's table (CSV or Parquet) and page written? Both, or neither."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..basics.files import check_writable, writing
from ..errors import OutputError

if TYPE_CHECKING:
    from ..results import PagedResult

FORMATS = (".csv", ".parquet")


def check_table(target: Path) -> None:
    """Raises `OutputError` if no table can be written there; leaves nothing behind."""
    if target.suffix not in FORMATS:
        raise OutputError(f"a table's name must end in {' or '.join(FORMATS)}; got {target}.")
    if target.suffix == ".parquet":
        try:
            import pyarrow  # type: ignore[import-untyped]  # noqa: F401
        except ImportError as error:
            raise OutputError(f'to write {target}: pip install "attnmech[parquet]", or name a .csv file.') from error
    check_writable(target)


def write_table_and_page(found: "PagedResult", table: Path, page: Path) -> None:
    """Writes a result's table, in the format given by its suffix, and its page."""
    check_table(table)
    frame = found.by_head()
    # Neither draft replaces its file before both are written.
    with writing(table) as rows:
        if table.suffix == ".csv":
            frame.to_csv(rows, index=False)
        else:
            frame.to_parquet(rows, index=False)
        with writing(page) as html:
            found.to_html(html)
