"""Training frameworks: a file for each, imported only by who uses it."""
