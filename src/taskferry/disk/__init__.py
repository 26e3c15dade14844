"""Whole files or none, temporaries, inputs that change."""
