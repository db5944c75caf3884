"""Run the command line as `python -m equipoise`."""

try:
    from equipoise.cli.app import main
except KeyboardInterrupt:  # Ctrl-C while the program starts
    raise SystemExit(130) from None

if __name__ == "__main__":
    main()
