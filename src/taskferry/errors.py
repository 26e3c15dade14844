"""The one error this package raises on purpose: what is wrong, and the next step."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 2000  # names in a message come from files, and may be of any length


class TaskferryError(ValueError):
    """Something in the inputs that the user can mend; the message says how."""

    def __init__(self, message: str) -> None:
        if len(message) > LONGEST:
            message = f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"
        super().__init__(message)


class MissingSettings(TaskferryError):
    """Settings of which nothing is wrong but that some are missing."""

    def __init__(self, sentence: str, more: str, names: Sequence[str]) -> None:
        super().__init__(sentence + more)
        self.sentence, self.names = sentence, tuple(names)


def first_line(error: Exception) -> str:
    """What a library says of its error, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
