"""What is counted, logged and read of the machine."""
