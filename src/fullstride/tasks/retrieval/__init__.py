"""Which images show the same thing as another one? Embeddings, and how well they retrieve."""
