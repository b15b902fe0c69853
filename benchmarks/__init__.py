"""One script per claim; peers in the same run where they are installed."""
