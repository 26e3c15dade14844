"""One page that shows a transfer, an analysis, a benchmark or a fleet: HTML that needs nothing else, or Markdown."""
