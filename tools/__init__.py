"A command a file: python nanodepth.py NAME."
