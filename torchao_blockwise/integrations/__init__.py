"""Training frameworks: a module for each, imported only by who uses it."""
