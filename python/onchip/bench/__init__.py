"""Benchmarks: cases, implementations of them, timers, memory, records. Needs numpy."""
