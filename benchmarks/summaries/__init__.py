"""Tables that pages show, from the rows of benchmarks/results: ratios, and their range over shapes and routings."""
