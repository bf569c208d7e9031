"""A frame on disk: CSV or Parquet, written whole or not at all."""

from pathlib import Path

import pandas as pd

from ..errors import OutputError
from ..files import check_writable, writing

FORMATS = (".csv", ".parquet")


def check_table(target: Path) -> None:
    """Raises `OutputError` if no table can be written there; leaves nothing behind."""
    if target.suffix not in FORMATS:
        raise OutputError(f"a table ends in {' or '.join(FORMATS)}; got {target}.")
    if target.suffix == ".parquet":
        try:
            import pyarrow  # type: ignore[import-untyped]  # noqa: F401
        except ImportError as error:
            raise OutputError(f'to write {target}: pip install "attnmech[parquet]", or name a .csv file.') from error
    check_writable(target)


def write_table(frame: pd.DataFrame, target: Path) -> None:
    """Writes a frame in the format that the name says."""
    check_table(target)
    with writing(target) as draft:
        if target.suffix == ".csv":
            frame.to_csv(draft, index=False)
        else:
            frame.to_parquet(draft, index=False)
