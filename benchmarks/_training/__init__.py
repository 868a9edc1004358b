"""One file a subcommand of `training.py`: ``run(quick)`` gives machine, setting and rows."""
