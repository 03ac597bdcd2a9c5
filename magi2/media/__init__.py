"""Pictures in, mp4 out: the reference image, the frames, the file. Importing the package loads no torch."""
