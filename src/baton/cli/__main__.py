"""`python -m baton.cli`: how the launcher starts its children."""

from baton.cli.main import main

main()
