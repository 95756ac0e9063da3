"""Time and memory of the operator and the layer beside their peers: `python -m benchmarks.run`."""
