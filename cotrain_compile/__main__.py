"""`python -m cotrain_compile`: the command line, where its script is not on the path."""

from cotrain_compile.cli.main import main

if __name__ == "__main__":
    main()
