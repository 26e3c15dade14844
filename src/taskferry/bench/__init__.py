"""Evidence: methods compared on one pair, and recipes that make whole tables."""
