"""The ``ddtree`` command: one thin module a verb."""
