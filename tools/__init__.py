"One command per file: python nanodepth.py NAME."
