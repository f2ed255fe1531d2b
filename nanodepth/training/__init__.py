"What surrounds a training run: its plan, its folder, its processes, its optimizers."
