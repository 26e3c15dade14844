"""Whole jobs, file to file, and the record that they all write."""
