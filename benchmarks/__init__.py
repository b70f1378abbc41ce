"""Measures mha_ext against PyTorch: `python -m benchmarks` (README.md here has the method and the latest numbers)."""
