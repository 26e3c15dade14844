"""What an alignment from a file must satisfy before it is applied: a file may be damaged, or made to do harm.

Sites, maps and parameters must fit each other, so that applying it can neither fail half-way nor take more memory than
its own maps suggest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from taskferry.disk.files import is_finite
from taskferry.errors import TaskferryError
from taskferry.layers.site import Site
from taskferry.linalg.procrustes import Map

if TYPE_CHECKING:
    from taskferry.alignment import Alignment

PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PACKED = 1024  # a packed matrix has at most so many times the rows of one of its parts
_TEXT = ("name", "weight", "role", "stack", "stream", "kind")


def check_alignment(alignment: Alignment, where: str) -> None:
    """Refuse an alignment that contradicts itself, naming the site."""
    for side, maps in (("R_in", alignment.R_in), ("R_out", alignment.R_out)):
        for key, R in maps.items():
            _need(_is_map(R), where, f"{side} of {key} is no map of finite numbers")
    tables = (alignment.source_parameters, alignment.target_parameters)
    for table in tables:
        for name, shape in table.items():
            _need(all(_is_size(n) for n in shape), where, f"{name} has the shape {shape}")
    texts = isinstance(alignment.reasons, dict) and all(isinstance(r, str) for r in alignment.reasons.values())
    _need(texts and isinstance(alignment.provenance, dict), where, "its reasons or its provenance")
    roles: dict[str, tuple[str, bool]] = {}  # target parameter -> what it is
    parts: dict[str, int] = {}
    names: set[str] = set()
    for pair in alignment.pairs:
        source, target = pair.source, pair.target
        for site in (source, target):
            _need(_is_site(site), where, f"the site {site.name!r}"[:200])
        what = f"{source.name} and {target.name}"
        _need(isinstance(pair.note, str), where, f"the note of {what}")
        _need(target.name not in names, where, f"{target.name} is there twice")
        names.add(target.name)
        R_in, R_out = _get(alignment.R_in, pair.reads), _get(alignment.R_out, target.name)
        _need(R_in is not None and R_in.shape == (source.shape[1], target.shape[1]), where, f"the input map of {what}")
        _need(
            R_out is not None and R_out.shape == (source.shape[0], target.shape[0]), where, f"the output map of {what}"
        )
        _need(
            _is_quality(_get(alignment.quality_in, pair.reads))
            and _is_quality(_get(alignment.quality_out, target.name)),
            where,
            f"the quality of {what}",
        )
        if not any(tables):
            continue  # finished groups of a fit know no parameters yet
        for site, table in zip((source, target), tables, strict=True):
            _need(_fits(site, table), where, f"the parameters of {site.name}")
        parts[target.weight] = parts.get(target.weight, 0) + 1
        _need(parts[target.weight] == 1 or target.rows is not None, where, f"{target.weight} is there twice")
        for parameter, kind in ((target.weight, "weight"), (target.bias, "bias")):
            if parameter is not None:
                is_now = (kind, target.transposed)
                _need(roles.setdefault(parameter, is_now) == is_now, where, parameter)


def _need(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise TaskferryError(f"{where}: a damaged alignment: {what} does not fit; fit it again")


def _get(table: Mapping[str, Any], key: Any) -> Any:
    return table.get(key) if isinstance(key, str) else None


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40


def _is_map(R: Map) -> bool:
    tensors = [tensor for tensor in (R.R, R.U, R.V) if tensor is not None]
    plain = all(t.ndim == 2 and t.dtype in PRECISIONS and is_finite(t) for t in tensors)
    return plain and (R.U is None or R.V is None or R.U.shape[1] == R.V.shape[1])


def _is_site(site: Site) -> bool:
    texts = all(isinstance(getattr(site, name), str) for name in _TEXT)
    maybe = all(value is None or isinstance(value, str) for value in (site.bias, site.fixed))
    block = site.block is None or _is_size(site.block)
    shape = len(site.shape) == 2 and all(_is_size(n) and n > 0 for n in site.shape)
    if not (texts and maybe and block and shape and isinstance(site.transposed, bool)):
        return False
    rows = site.rows
    if rows is None:
        return True
    if len(rows) not in (2, 3) or not all(map(_is_size, rows)) or rows[0] >= rows[1]:
        return False
    width = rows[1] - rows[0]
    return width == site.shape[0] if len(rows) == 2 else rows[1] <= rows[2] and site.shape[0] % width == 0


def _is_quality(quality: Any) -> bool:
    if quality is None or not _is_size(quality.rank):
        return False
    values = (quality.rows, quality.similarity, quality.residual, quality.largest)
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return numbers and (quality.smallest is None or isinstance(quality.smallest, int | float))


def _fits(site: Site, parameters: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a site is (a part of) its parameters as they are stored."""
    stored, bias = parameters.get(site.weight), parameters.get(site.bias or "")
    if stored is None or len(stored) < 2:
        return False
    out, wide = stored[0], math.prod(stored[1:])
    if site.transposed:
        out, wide = wide, out
    if wide != site.shape[1] or not _holds(out, site):
        return False
    if site.bias is None:
        return True
    return bias is not None and len(bias) == 1 and _holds(bias[0], site)


def _holds(out: int, site: Site) -> bool:
    if site.rows is None:
        return out == site.shape[0]
    start, stop, *period = site.rows
    if period:  # one run of rows for every head
        return out == site.shape[0] // (stop - start) * period[0] and period[0] <= PACKED * (stop - start)
    return stop <= out <= PACKED * site.shape[0]
