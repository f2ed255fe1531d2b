"""An ordinary model at toy size: the yardstick of everything else."""
out_dir = 'out/baseline'
