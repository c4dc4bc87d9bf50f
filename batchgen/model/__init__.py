"""Language models from a folder, a Hub id or a published shape's name. ``registry`` and ``config`` need no torch."""
