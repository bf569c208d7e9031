"""One research question a file; none of them imports another."""
