"""Tools, run as ``python -m scripts.<name>``."""
