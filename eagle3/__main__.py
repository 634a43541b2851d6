"""`python -m eagle3` is the command `eagle3`."""

from eagle3.cli import main

if __name__ == "__main__":
    main()
