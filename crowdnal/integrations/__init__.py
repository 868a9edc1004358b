"""Thin adaptors to other people's loops, a file each; the library itself is imported with it and never by crowdnal."""
