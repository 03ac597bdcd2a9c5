"""One engine over many ranks: the layout, its memory, its process groups and what crosses between ranks."""
