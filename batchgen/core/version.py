"""Version of the package, which ``pyproject.toml`` reads here, and of what it computes."""

__version__ = "0.1.0"
RESULTS = 6  # goes up with each change of any byte of any record; rows of another one are not kept
