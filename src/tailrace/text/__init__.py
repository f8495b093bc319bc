"""Text: tokens, chat templates and stop strings. No torch."""
