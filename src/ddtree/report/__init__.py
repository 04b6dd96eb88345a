"""Findings from results: numbers, plots, a recommendation, and the check of one result set against another."""
