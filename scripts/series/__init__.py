"""Fetch, apply, gate, check and edit the patch series under `patches/`."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        # These imports take half a second, in which Ctrl-C ends the command as quietly as later.
        from series import cli
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()
