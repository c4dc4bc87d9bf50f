"""The command line: one file per command, options shared by commands."""
