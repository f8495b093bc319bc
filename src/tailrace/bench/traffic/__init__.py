"""When requests arrive and how long they are: trace files, profiles of figures, the schedule."""
