"One command per file: nanodepth NAME. (compare has arms.py beside it, and train has cost.py.)"
