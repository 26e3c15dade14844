"""Structure-aware mutation: files that are nearly right, which is where readers fail.

    >>> mutant = Mutator(seed)
    >>> mutant.safetensors(good_bytes)

JSON is changed as JSON, a safetensors header as what it is, and all of it also as mere bytes. The same seed makes the
same files.
"""

from __future__ import annotations

import json
import random
import struct
from typing import Any

WORDS = [
    None, True, False, 0, 1, -1, 2, 3, 255, 2**31, 2**31 - 1, 2**32, 2**53, 2**63, -(2**63), 2**64, 10**30, 10**400,
    -0.0, 0.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"), "", "a", "0", "..", "../../etc/passwd",
    "/etc/passwd", "C:\\x", "a/b", "\x00", "\x1b[2J", "\u202e", "\ud800", "x" * 300, "x" * 70_000, "(x|xx)*y", "(",
    "%s%n", "{0.__class__}", "${x}", "__proto__", "!!python/object:os", [], {}, [[]], [None], {"": 0}, [0] * 1000,
    "F16", "F32", "BF16", "F64", "I64", "BOOL", "U8", "F8_E4M3", "F8_E5M2", "LORA", "IA3", "encoder.layer.0",
]  # fmt: skip


class Mutator:
    """One stream of mutants."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def blob(self, data: bytes) -> bytes:
        """Bytes with a few places changed, cut, doubled or moved."""
        found = bytearray(data)
        for _ in range(self.random.choice((1, 1, 1, 2, 4, 16))):
            at = self.random.randrange(len(found) + 1)
            match self.random.randrange(8):
                case 0 if found:
                    found[at % len(found)] ^= 1 << self.random.randrange(8)
                case 1 if found:
                    found[at % len(found)] = self.random.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x5B, 0x7B, 0x0A))
                case 2:
                    del found[at:]
                case 3:
                    del found[at : at + self.random.randrange(1, 40)]
                case 4:
                    found[at:at] = self.random.randbytes(self.random.randrange(1, 40))
                case 5:
                    found[at:at] = found[at : at + self.random.randrange(1, 200)]
                case 6:
                    found[at : at + 8] = struct.pack(
                        "<Q", self.random.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(found)))
                    )
                case _:
                    other = self.random.randrange(len(found) + 1)
                    found[at:at] = found[other : other + 16]
        return bytes(found)

    def value(self, data: Any) -> Any:
        """Nested lists and dictionaries with one or a few places changed."""
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            data = self._changed(data)
        return data

    def _changed(self, data: Any) -> Any:
        if isinstance(data, dict) and data and self.random.random() < 0.9:
            key = self.random.choice(list(data))
            copy = dict(data)
            match self.random.randrange(12):
                case 0:
                    del copy[key]
                case 1:
                    copy[str(self._word())[:80]] = copy.pop(key)
                case 2:
                    copy[str(self._word())[:80]] = self._word()
                case 3:
                    copy[key] = copy[self.random.choice(list(data))]
                case _:
                    copy[key] = self._changed(data[key])
            return copy
        if isinstance(data, list) and data and self.random.random() < 0.9:
            copy_ = list(data)
            at = self.random.randrange(len(copy_))
            match self.random.randrange(8):
                case 0:
                    del copy_[at]
                case 1:
                    copy_.insert(at, self._word())
                case 2:
                    copy_.append(copy_[at])
                case _:
                    copy_[at] = self._changed(copy_[at])
            return copy_
        if isinstance(data, str) and data and self.random.random() < 0.4:
            at = self.random.randrange(len(data))
            return data[:at] + str(self._word())[:40] + data[at + self.random.randrange(2) :]
        if isinstance(data, int | float) and not isinstance(data, bool) and self.random.random() < 0.5:
            return data + self.random.choice((-1, 1, 2, 7, -data, data))
        return self._word()

    def _word(self) -> Any:
        return self.random.choice(WORDS)

    def text(self, data: Any) -> bytes:
        """JSON of a changed value, sometimes with its bytes changed as well."""
        made = dump(self.value(data) if self.random.random() < 0.9 else data)
        return self.blob(made) if self.random.random() < 0.25 else made

    def safetensors(self, data: bytes, inner: str | None = None) -> bytes:
        """A file with its header changed as JSON, or anything as bytes; `inner` names JSON within the metadata."""
        if self.random.random() < 0.25:
            return self.blob(data)
        size = struct.unpack("<Q", data[:8])[0]
        header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
        if inner is not None and self.random.random() < 0.7:
            kept = json.loads(header["__metadata__"][inner])
            header["__metadata__"] = {inner: dump(self.value(kept)).decode("utf-8", "replace")}
        elif self.random.random() < 0.3 and body:
            body = self.blob(body)[: len(body)].ljust(len(body), b"\xff")  # numbers, of the right length
        else:
            header = self.value(header)
        text = dump(header)
        return struct.pack("<Q", len(text)) + text + body


def dump(data: Any) -> bytes:
    """JSON as hostile writers make it: any number, any letter."""
    try:
        return json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):
        return repr(data).encode("utf-8", "replace")
