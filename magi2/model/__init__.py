"""The diffusion transformer as plain modules; names inside them are those of the released checkpoint."""
