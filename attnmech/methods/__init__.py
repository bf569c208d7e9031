"""One folder per research question; none of them imports another."""
