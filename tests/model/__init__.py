"""Models of protocols, explored exhaustively at small sizes, and kept equal to the code by replayed traces."""
