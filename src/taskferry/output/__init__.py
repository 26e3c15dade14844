"""Everything that is written about a move: its verdict, its record, its card, its page, and the output itself."""
