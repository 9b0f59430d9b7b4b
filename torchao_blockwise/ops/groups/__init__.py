"""Tokens of experts: where their groups end, tables made of that, tokens sorted into groups, and groups quantized."""
