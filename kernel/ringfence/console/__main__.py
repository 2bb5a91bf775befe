"""`python -m ringfence.console`: the command line without an installed script."""

from ringfence.console.cli import main

if __name__ == "__main__":
    main()
