"""The command-line program: one file per command, and the output to the terminal."""
