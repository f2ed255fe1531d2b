"What surrounds a training run."
