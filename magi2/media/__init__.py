"""Pictures in, mp4 out: the reference image, the finished frames and the file. Importing it loads no torch."""
