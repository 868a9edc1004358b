"""One file a table of `reproduce.py`: ``run(root, seeds, quick)`` gives its rows."""
