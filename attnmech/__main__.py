"""`python -m attnmech` is the command `attnmech`."""

from .cli.main import main

if __name__ == "__main__":
    main()
