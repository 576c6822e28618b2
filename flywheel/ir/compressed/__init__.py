"""A program's records in short: adjacent tasks as runs of tiles, and layers that are alike once.

Everybody else imports from here, not from the modules of this folder.
"""

from flywheel.ir.compressed.layers import (
    NO_LAYERS,
    LayeredTable,
    Layers,
    Span,
    brief_table,
    column_of,
    index_of,
    moved,
    split_at_indices,
    table_of,
)
from flywheel.ir.compressed.repeating import (
    Brief,
    as_runs,
    brief_of,
    brief_runs,
    layers_of,
    local_layers,
    repeated,
    runs_of,
    spelled_out,
)
from flywheel.ir.compressed.runs import (
    NO_SM,
    Run,
    Runs,
    Use,
    distinct_tasks,
    ends_of,
    ids_of,
    make_run,
    sms_of,
    task_of,
    tasks_by_recipe,
    uses_by_recipe,
)
from flywheel.ir.compressed.tiles import Stretch, Tile, Tiles, tiles_of

__all__ = [
    "NO_LAYERS", "NO_SM", "Brief", "LayeredTable", "Layers", "Run", "Runs", "Span", "Stretch", "Tile", "Tiles", "Use",
    "as_runs", "brief_of", "brief_runs", "brief_table", "column_of", "distinct_tasks", "ends_of", "ids_of", "index_of",
    "layers_of", "local_layers", "make_run", "moved", "repeated", "runs_of", "sms_of", "spelled_out",
    "split_at_indices", "table_of", "task_of", "tasks_by_recipe", "tiles_of", "uses_by_recipe",
]  # fmt: skip
