"""Output formats: each writes the rows of a journal to one file. A new one is a module and an entry in ``select``."""
