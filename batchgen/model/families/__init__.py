"""Model families, one module each: how a family's ``config.json`` is read, its tensor names, its published shapes."""
