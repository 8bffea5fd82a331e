"""Links between processes: one inbox each (ZeroMQ PULL, bound), others push to it. Nothing is dropped or reordered."""
