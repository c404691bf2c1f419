"""What a run will take: memory, traffic and time, by formula. Imports neither torch nor numpy."""
