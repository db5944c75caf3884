"""Files on disk: atomic writes, tensors, run folders and the index of runs."""
