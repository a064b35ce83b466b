"""Benchmarks: named cases, what can compute them, measurements, and the records of both."""
