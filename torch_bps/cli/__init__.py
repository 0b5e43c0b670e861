"""The command `byteps`."""
