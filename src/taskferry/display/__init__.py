"""Tables and progress bars, for terminals and notebooks."""
