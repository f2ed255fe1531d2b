"One experiment per file: assignments only."
