"""Engines for what does not fit one process: block by block, many processes, fleets."""
