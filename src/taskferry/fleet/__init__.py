"""Many adapters, on Ray."""
