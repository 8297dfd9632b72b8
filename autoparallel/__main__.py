"""``python -m autoparallel``: the command line, where the ``autoparallel`` script is not on the path."""

from autoparallel.cli import main

if __name__ == "__main__":
    main()
