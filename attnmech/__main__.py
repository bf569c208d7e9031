"""The command `attnmech`, also as `python -m attnmech`. Ctrl-C ends it with one line, even during its imports."""

import sys


def main() -> None:
    """The entry point."""
    try:
        from .cli.main import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        sys.exit(130)
    finally:
        # After Ctrl-C during an `exec`, Python ends by the signal and not with the exit status, unless another follows.
        exec("")


if __name__ == "__main__":
    main()
