"""`python -m attnmech` is the command `attnmech`."""

from .cli import main

if __name__ == "__main__":
    main()
