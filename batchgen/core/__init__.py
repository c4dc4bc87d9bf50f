"""Base of every room: errors, records, units, storage, this machine. Imports no other room."""
