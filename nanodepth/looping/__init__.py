"The wrapper's engine: the layers of any model, a window of them, caches and solvers."
