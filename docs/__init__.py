"""The documentation, and the script that draws its figures."""
