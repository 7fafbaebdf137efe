"""The engine's part in transfers: sends and receives of sequences, and messages to peers."""
