"""``python -m batchgen``: the command line without the console script."""

from batchgen.cli import main

if __name__ == "__main__":
    main()
