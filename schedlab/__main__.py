"""`python -m schedlab`: the command line."""

from schedlab.experiments.commands.cli import main

main()
