"The commands of `nanodepth`, one in each file."
