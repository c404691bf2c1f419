"""`python -m minipar`."""

from minipar.cli import main

if __name__ == "__main__":
    main()
