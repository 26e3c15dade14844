"""One page that shows a transfer or a fleet: HTML that needs nothing else, or Markdown."""
