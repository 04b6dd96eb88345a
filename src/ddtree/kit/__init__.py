"""Reproduction kits: what was measured and on what, sealed so that it checks itself and can be brought back to life.

Never imports torch. Checking a folder or a zip needs the base installation alone.
"""
