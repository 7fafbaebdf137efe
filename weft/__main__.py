"""``python -m weft``: the same as the command ``weft``."""

from weft.cli.main import main

if __name__ == "__main__":
    main()
