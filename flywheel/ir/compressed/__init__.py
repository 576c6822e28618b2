"""A program's records in short: adjacent tasks as runs of tiles, and layers that are alike once.

Everybody else imports from here, not from the modules of this folder.
"""

from flywheel.ir.compressed.layers import (
    LayeredTable,
    Layers,
    Span,
    column_of,
    index_of,
    moved,
    split_at_indices,
)
from flywheel.ir.compressed.numbered import NumberedRuns, as_runs, runs_of
from flywheel.ir.compressed.repeating import Brief, brief_of, layers_of, local_layers, repeated, spelled_out
from flywheel.ir.compressed.runs import Run, Runs, Use, ends_of, make_run, task_of, tasks_by_recipe, uses_by_recipe
from flywheel.ir.compressed.tiles import Stretch, Tile, Tiles, stretches_of

__all__ = [
    "Brief",
    "LayeredTable",
    "Layers",
    "NumberedRuns",
    "Run",
    "Runs",
    "Span",
    "Stretch",
    "Tile",
    "Tiles",
    "Use",
    "as_runs",
    "brief_of",
    "column_of",
    "ends_of",
    "index_of",
    "layers_of",
    "local_layers",
    "make_run",
    "moved",
    "repeated",
    "runs_of",
    "spelled_out",
    "split_at_indices",
    "stretches_of",
    "task_of",
    "tasks_by_recipe",
    "uses_by_recipe",
]
