"""Pieces of kernels that operations share; what is Gluon's says so in its name."""
