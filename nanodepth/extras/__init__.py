"Extras that no other part of the package imports: a page to play with a toy."
