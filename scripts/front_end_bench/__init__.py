"""What ``scripts/bench_front_end.py`` measures the front end with."""
