"""Measuring servers: workloads, load, statistics, grading, sweeps. Never imports torch."""
