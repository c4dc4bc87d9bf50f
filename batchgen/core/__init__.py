"""What every room stands on: errors, records, units, storage, this machine. Imports no other room."""
