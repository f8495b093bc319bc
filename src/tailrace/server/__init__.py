"""The front end: HTTP in, token streams out. No torch here."""
