"""The kinds of rows, by the layout that a call says."""

from fa_autotune.ops.call import BHSD, BHSD_STORED_AS_BSHD, BSHD, PACKED
from fa_autotune.ops.rows.fixed import FixedRows
from fa_autotune.ops.rows.packed import PackedRows
from fa_autotune.ops.rows.rows import Rows

ROWS: dict[int, Rows] = {
    **{layout: FixedRows(layout) for layout in (BHSD, BSHD, BHSD_STORED_AS_BSHD)},
    PACKED: PackedRows(),
}


def rows_of(layout: int) -> Rows:
    """How the rows and keys of a layout's tensors are found."""
    return ROWS[layout]
