"""What ``scripts/bench_engine.py``, ``bench_model.py`` and ``bench_table.py`` measure with."""
