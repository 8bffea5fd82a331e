"""The parts of bench_engine.py."""
