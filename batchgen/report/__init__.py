"""The report of a run: built from its rows and its usage, and shown as text or HTML."""
