"""Why does a head look where it looks? Scores as exact sums of terms."""
