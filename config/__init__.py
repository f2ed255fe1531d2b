"An experiment a file: assignments only."
