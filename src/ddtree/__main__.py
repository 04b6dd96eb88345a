"""``python -m ddtree`` and the ``ddtree`` command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from ddtree.cli.main import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # even while modules are still being imported
        print("\ninterrupted", file=sys.stderr)
        code = 130
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Under torchrun a thread that torch leaves behind sometimes aborts the interpreter's own way out.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
