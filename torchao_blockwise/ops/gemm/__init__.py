"""Products of two quantized operands: `plain`, and `grouped` by expert. On Hopper one Gluon pipeline computes both."""
