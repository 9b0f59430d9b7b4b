"""Flat shards of a tensor: cast with the bits of the whole, and payloads merged from gathered ones."""
