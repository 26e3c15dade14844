"""Hubs and the Trainer of transformers."""
