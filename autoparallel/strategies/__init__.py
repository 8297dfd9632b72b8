"""The strategy graph: every decision of a program on a mesh. See README.md."""
