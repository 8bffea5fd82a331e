"""The parts of bench_kernels.py."""
