"""Whether answers are right, with and without speculation: tests in a locked-down process, exact matches."""
