"The wrapper for models of other families, and more solvers for it."
