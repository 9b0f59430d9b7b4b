"""Tuning: how long things take on this machine, and the tables by which AUTO chooses backends."""

from torchao_blockwise.tuning.products import Product, error_budget, product_error, time_product
from torchao_blockwise.tuning.tables import products_of, tune, write_table
from torchao_blockwise.tuning.timing import Timing, host_time, input_sets, time_eager, time_runs

__all__ = [
    "Product",
    "Timing",
    "error_budget",
    "host_time",
    "input_sets",
    "product_error",
    "products_of",
    "time_eager",
    "time_product",
    "time_runs",
    "tune",
    "write_table",
]
