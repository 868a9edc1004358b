"""CMM: groups of annotations share a confusion."""
