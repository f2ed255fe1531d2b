"Wrap models of other families, and define more solvers for the wrapper."
