"""Methods that move a task vector, behind one interface: one file and one decorator each."""

from taskferry.engines.pair import CannotMove, Moved
from taskferry.methods.registry import (
    FOLDS,
    Cost,
    Job,
    MapRank,
    Method,
    Needs,
    Shown,
    TableRow,
    Tolerance,
    find,
    method,
    methods,
    need_equal_shapes,
    published,
    run,
)

__all__ = [
    "FOLDS",
    "CannotMove",
    "Cost",
    "Job",
    "MapRank",
    "Method",
    "Moved",
    "Needs",
    "Shown",
    "TableRow",
    "Tolerance",
    "find",
    "method",
    "methods",
    "need_equal_shapes",
    "published",
    "run",
]
