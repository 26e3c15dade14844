"""`python -m taskferry`."""

from taskferry.cli import main

if __name__ == "__main__":
    main()
