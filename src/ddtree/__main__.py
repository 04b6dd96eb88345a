"""``python -m ddtree`` and the ``ddtree`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from ddtree.cli.main import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # even while modules are still being imported
        print("\ninterrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
