"""The load generator behind ``scripts/benchmark_sharegpt.py``."""
