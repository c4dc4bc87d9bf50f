"""Version of the package, as in ``pyproject.toml``; recorded in manifests and reports."""

__version__ = "0.1.0"
