"""What every package may use: late imports, processes, layers."""
