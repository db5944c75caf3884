"""What users start: runs, the demonstration and sweeps; and what they ask for: lists, results and exports."""
