"""Benchmarks of Sluice against baselines; they need a checkout and the extra `bench`."""
