"One command per file: nanodepth NAME."
