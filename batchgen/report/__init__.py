"""The report of a run: built from its rows and what it spent, and shown as text, HTML or Prometheus metrics."""
