"""Methods that move a task vector, behind one interface: one file and one decorator each."""

from taskferry.engines.pair import CannotMove, Moved
from taskferry.methods.registry import (
    Job,
    MapRank,
    Method,
    Needs,
    Tolerance,
    find,
    method,
    methods,
    need_equal_shapes,
    published,
    run,
)

__all__ = [
    "CannotMove",
    "Job",
    "MapRank",
    "Method",
    "Moved",
    "Needs",
    "Tolerance",
    "find",
    "method",
    "methods",
    "need_equal_shapes",
    "published",
    "run",
]
