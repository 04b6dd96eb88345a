"""Sweeps: points over the keys of a deployment, each applied, verified and measured."""
