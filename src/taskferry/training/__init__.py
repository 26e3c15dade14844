"""Training: one loop, for `--refine`."""
