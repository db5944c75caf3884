"""Run the command line as `python -m equipoise`."""

from equipoise.cli.app import main

if __name__ == "__main__":
    main()
