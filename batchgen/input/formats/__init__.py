"""Readers of input formats: each turns one file into rows. A new format is a module and an entry in ``source``."""
