"""`python -m fullstride` is the command `fullstride`."""

from fullstride.cli import main

if __name__ == "__main__":
    main()
