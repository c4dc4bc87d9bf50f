"""Rows in: sources and formats, row checks, templates and messages, requests. Imports no engine and no torch."""
