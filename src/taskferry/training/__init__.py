"""Training: one loop, for `distil`."""
