"""The one error this package raises on purpose: what is wrong, and the next step."""

from __future__ import annotations


class TaskferryError(ValueError):
    """Something in the inputs that the user can mend; the message says how."""
