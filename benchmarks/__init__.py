"""Benchmarks against the peers that Sluice is compared with. They need a checkout and the extra `bench`."""
