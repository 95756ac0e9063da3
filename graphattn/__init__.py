"""graphattn: attention restricted to the edges of a graph."""
